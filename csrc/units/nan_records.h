// NanRecords: where NaN and Inf were seen since the last step. The only memory of it.
//
// Of each slot, counted over all units of an engine, there are two facts:
//   gradient  one of this rank's own gradients held NaN or Inf, and in which micro-batch;
//   sum       this rank's part of the reduced sum may hold NaN or Inf.
// On the host a kernel's answer is known at once, and a suspected sum is searched in the step. On a
// device kernels set flags (DeviceFlags), and the step's verdict is computed there from them; only
// sums that the user wrote to are searched. With offload gradients have a device's flags, which are
// read when their backward ends, and sums are the host's.
//
// Owner:     Engine.
// Threads:   called only under the engine's lock.
// Invariant: record k belongs to the k-th slot; a step's answer changes nothing but suspicions that
//            were looked into.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "device/device_flags.h"
#include "device/kernel_table.h"
#include "kernels/kernels.h"

namespace zero_ext {

class NanRecords {
 public:
  // Where gradients arrive, and where sums lie.
  NanRecords(const KernelTable& compute, const KernelTable& state, int64_t rank);

  // One more record for each of these parameters, from count() on.
  void add(const std::vector<int64_t>& parameters);
  int64_t count() const { return static_cast<int64_t>(parameters_.size()); }

  // A gradient of this rank: of the host; the flag for a device's kernel to set.
  void saw_in_gradient(int64_t k);
  int32_t* gradient_flag(int64_t k) { return flags_->arrival(k); }
  // A sum: where the host's kernel found one, or the user wrote to it; the flag for a device's
  // kernel to set, null on the host.
  void suspect_sum(int64_t k) { suspected_[k] = 1; }
  int32_t* sum_flag(int64_t k) { return state_.on_host() ? nullptr : flags_->sum(k); }
  // The gradient of record k is gone.
  void clear(int64_t k);

  void begin_backward(int64_t micro_batch);
  // All gradients have arrived. With offload it waits for the device.
  void end_gradients();
  // The backward cannot be undone any more. `direct`: its gradients went into the sums.
  void end_backward(bool direct);
  // What it saw in its gradients is forgotten.
  void abort_backward();

  // This rank's part of the reduced sum of a parameter; none where it holds nothing.
  using SumOf = std::function<std::optional<kernels::ReadSegment>(int64_t parameter)>;
  // What a step asks of `records`. On the host:
  struct Found {
    bool finite = true;                 // no sum holds NaN or Inf
    int64_t first = nan_record::kNone;  // the first record
  };
  Found search(const std::vector<int64_t>& records, const SumOf& sum_of) const;
  // On a device: int64 [2], 1 if no sum holds NaN or Inf, else 0; and the first record.
  at::Tensor search_on_device(const std::vector<int64_t>& records, const SumOf& sum_of);

 private:
  static constexpr int64_t kNever = -1;

  KernelTable state_;
  int64_t rank_;
  std::optional<DeviceFlags> flags_;        // where gradients arrive on a device
  std::vector<int64_t> parameters_;         // [records]
  std::vector<int64_t> first_micro_batch_;  // [records], with NaN or Inf in a gradient; or kNever
  std::vector<uint8_t> suspected_;          // [records]: sums to be searched
  int64_t micro_batch_ = 0;                 // of the last backward
};

}  // namespace zero_ext
