// HostIntake: gradients on the host, each added as it arrives. See GradientIntake.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/kernels.h"
#include "units/gradient_intake.h"

namespace zero_ext {

class HostIntake final : public GradientIntake {
 public:
  using GradientIntake::GradientIntake;

 private:
  void add(int64_t i, const at::Tensor& grad, bool first, float scale) override;
  void message_was_lent() override;
  void stage() override;
  void add_held_to_local() override;

  // `nonfinite` becomes 1 where the gradient holds NaN or Inf.
  void add_directly(int64_t i, const at::Tensor& grad, float scale, int32_t* nonfinite);
  void add_to_local(int64_t i, const at::Tensor& grad, int32_t* nonfinite);
  void add_to_message(int64_t i, const at::Tensor& grad, kernels::Write write, int32_t* nonfinite);
  // Records a gradient with NaN or Inf in slot i, where `nonfinite` says so.
  void record(int64_t i, int32_t nonfinite);
  void stage_held();
  void stage_local_slot(int64_t i);
  void clear_gap(int64_t i);
  // What this rank does not contribute becomes zeros.
  void clear_absent();
};

}  // namespace zero_ext
