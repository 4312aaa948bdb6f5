// DeviceIntake: gradients on a device, which wait until their unit is complete, for one launch of
// all. See GradientIntake.
//
// Invariant: everything is queued on the current stream, which first waits for the stream of the
//            last gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "units/gradient_batch.h"
#include "units/gradient_intake.h"

namespace zero_ext {

class DeviceIntake final : public GradientIntake {
 public:
  DeviceIntake(const UnitContext& context, const RankLayout& layout, GradientSums& sums,
               Arrivals& arrivals, int64_t first_record)
      : GradientIntake(context, layout, sums, arrivals, first_record),
        waiting_(context, layout, first_record) {}

  void flush() override;

 private:
  void begin_on_stream() override;
  void follow_stream() override;
  void drop_waiting() override;
  void add(int64_t i, const at::Tensor& grad, bool first, float scale) override;
  void message_was_lent() override;
  void stage() override;
  void add_held_to_local() override;

  void launch_waiting();
  // This rank's own sums; with one rank they are the reduced ones.
  GradientBatch::SumOf own_sums() const;
  // Launches all that is held, in batches of at most one of each slot. `first(i)`: nothing is in
  // slot i's place yet.
  void launch_held(const std::function<bool(int64_t)>& first,
                   const std::function<void(GradientBatch&)>& launch);
  void add_held_to(const GradientBatch::SumOf& sum_of);
  void stage_local();

  GradientBatch waiting_;  // for one launch into the sums
  // The stream of the last gradient, at first the one that began the backward.
  std::optional<c10::Stream> last_stream_;
};

}  // namespace zero_ext
