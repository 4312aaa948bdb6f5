// Unit: the parameters that are reduced, stepped and gathered together. Owns them, their masters
// and the sums of their gradients, and takes its gradients through one backward.
//
// Owner:     Engine, which says when each verb runs.
// Threads:   called only under the engine's lock.
// Invariant: parameters, masters, sums and every optimizer state share one RankLayout.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "memory/rank_layout.h"
#include "units/arrivals.h"
#include "units/changed_elements.h"
#include "units/gradient_intake.h"
#include "units/gradient_sums.h"
#include "units/unit_context.h"
#include "units/unit_parameters.h"

namespace zero_ext {

constexpr int64_t kMaxUnits = 1 << 12;  // of one engine: the tags of messages have no room for more

class Unit {
 public:
  // That hold its parameters together: the engine's, or a subset of them.
  struct Ranks {
    const UnitContext& context;
    Comm& comm;
    const std::vector<int64_t>& places;  // in the engine; empty: all
    // The number in the engine of rank r here.
    int64_t place(int64_t r) const { return places.empty() ? r : places[r]; }
  };
  // `values`: the parameters' present values, in any one floating dtype. `dtype`: what the
  // parameters are computed in. `first_record`: that of slot 0 among the context's
  // NaN records.
  Unit(const Ranks& ranks, int64_t index, int64_t first_record, std::string name,
       std::vector<SlotSpec> specs, const std::vector<at::Tensor>& values, at::ScalarType dtype,
       UnitKind kind, bool broadcast);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  friend ChangedElements& changes_of(Unit& unit) { return unit.changes_; }

  const Ranks& ranks() const { return ranks_; }
  int64_t index() const { return index_; }
  const std::string& name() const { return name_; }
  const RankLayout& layout() const { return layout_; }
  at::ScalarType dtype() const { return dtype_; }
  UnitParameters& parameters() { return parameters_; }
  const UnitParameters& parameters() const { return parameters_; }
  GradientSums& sums() { return sums_; }
  const GradientSums& sums() const { return sums_; }
  // The number of slot i's NaN record.
  int64_t record(int64_t i) const { return first_record_ + i; }

  // The dtype in which gradients arrive, and in which an exchange sends them; at first dtype().
  // Before any backward.
  void set_gradient_dtype(at::ScalarType dtype) { gradient_dtype_ = dtype; }
  // Of this rank's message to the other ranks: the gradients of one backward.
  at::ScalarType message_dtype() const;
  int64_t message_bytes() const {
    return layout_.padded_numel() * static_cast<int64_t>(c10::elementSize(gradient_dtype_));
  }

  // Of the whole parameters.
  int64_t full_bytes() const {
    return layout_.padded_numel() * static_cast<int64_t>(c10::elementSize(dtype_));
  }

  // One backward begins. `expected[i]`: autograd will reach slot i.
  void begin_backward(GradientPath path, bool reduces, const std::vector<uint8_t>& expected);
  Arrivals& arrivals() { return arrivals_; }
  const Arrivals& arrivals() const { return arrivals_; }
  bool expects_gradients() const { return arrivals_.expects_any(); }
  GradientIntake& intake() { return *intake_; }
  // A gradient of slot i, of any strides; undefined: autograd reached the parameter with nothing.
  // `scale`: see GradientIntake::take().
  void accumulate(int64_t i, const at::Tensor& grad, float scale);
  // No gradient arrives any more.
  void flush();
  // The backward cannot be undone any more. `remember`: how many hidden gradients it had.
  void end_backward(bool remember);
  // The backward threw: the sums become what they were before it.
  void abort_backward();

  // See FlatBuffer::offload and reload: of the parameters, the masters, the sums.
  void offload(const std::set<std::string>& states);
  void reload();

 private:
  void check_gradient(int64_t i, const at::Tensor& grad) const;

  // Constant after construction.
  const Ranks ranks_;
  const UnitContext& context_;
  int64_t index_;
  int64_t first_record_;
  std::string name_;
  at::ScalarType dtype_;
  at::ScalarType gradient_dtype_;
  RankLayout layout_;

  GradientSums sums_;
  UnitParameters parameters_;
  ChangedElements changes_;
  Arrivals arrivals_;
  std::unique_ptr<GradientIntake> intake_;
};

}  // namespace zero_ext
