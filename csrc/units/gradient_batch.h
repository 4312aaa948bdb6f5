// GradientBatch: gradients of a unit on a device that wait for each other, for one launch.
//
// Owner:     a DeviceIntake.
// Threads:   called only under the engine's lock.
// Invariant: at most one gradient of each slot.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "memory/rank_layout.h"
#include "units/unit_context.h"

namespace zero_ext {

class GradientBatch {
 public:
  // `layout`: the unit's, which outlives this. `first_record`: that of slot 0 among the context's
  // NaN records.
  GradientBatch(const UnitContext& context, const RankLayout& layout, int64_t first_record)
      : context_(context), layout_(layout), first_record_(first_record) {}

  // `grad`: dense, strides as the slot's. `first`: it overwrites what is in its place. `scale`: of
  // gradients that are added to a sum.
  void add(int64_t i, const at::Tensor& grad, bool first, float scale);
  bool empty() const { return entries_.empty(); }
  void clear() { entries_.clear(); }

  // Both launch one kernel for all gradients that are equal in dtype, scale and `first`, and leave
  // the batch empty. The kernels set the gradient flags of slots with NaN or Inf.
  // Where the sum of a slot's piece lies.
  using SumOf = std::function<float*(int64_t i, const Piece&)>;
  void add_to(const SumOf& sum_of);
  // Into the slots' places in `flat` [padded].
  void copy_into(const at::Tensor& flat);

 private:
  struct Entry {
    int64_t slot;
    at::Tensor grad;
    bool first;
    float scale;
  };
  using Group = std::span<const Entry>;  // of one launch
  void in_groups(const std::function<void(Group)>& launch);
  int32_t* flag(int64_t i) const;

  const UnitContext& context_;
  const RankLayout& layout_;
  int64_t first_record_;
  std::vector<Entry> entries_;
};

}  // namespace zero_ext
