// DeviceFlags: flags in device memory that kernels set where they find NaN or Inf. The host never
// waits for them: a step's verdict is computed from them on the device.
//
// Owner:     NanRecords.
// Threads:   called only under the engine's lock; everything is queued on the current stream.
// Invariant: flag k belongs to the k-th slot, counted over all units.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace zero_ext {

// A NaN record: where a NaN or Inf was found, as one number. Records are ordered by micro-batch,
// then by rank, then by parameter.
namespace nan_record {
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
// Not a NaN record: the ranks' sums come from different backwards.
constexpr int64_t kOutOfStep = kNone - 1;
// On a rank of another dimension of the mesh.
constexpr int64_t kElsewhere = kNone - 2;
// The micro-batch of a sum that overflowed although no single gradient did.
constexpr int64_t kUnknownMicroBatch = (int64_t{1} << 22) - 1;
constexpr int64_t of(int64_t micro_batch, int64_t rank, int64_t parameter) {
  return micro_batch << 40 | rank << 24 | parameter;
}
constexpr int64_t micro_batch(int64_t nan_record) { return nan_record >> 40; }
constexpr int64_t rank(int64_t nan_record) { return (nan_record >> 24) & 0xffff; }
constexpr int64_t parameter(int64_t nan_record) { return nan_record & 0xffffff; }
}  // namespace nan_record

class DeviceFlags {
 public:
  DeviceFlags(c10::Device device, int64_t rank) : device_(device), rank_(rank) {}

  // Adds one flag for each of these parameters, from count() on.
  void add(const std::vector<int64_t>& parameters);
  int64_t count() const { return count_; }

  // The flags that kernels set: for a gradient of this rank, and for a reduced sum.
  int32_t* arrival(int64_t k) { return pointer(arrivals_, k); }
  int32_t* sum(int64_t k) { return pointer(sums_, k); }

  void begin_backward() { apply_clears(); }
  // The flags of the gradients of this backward become NaN records. `direct`: the gradients were
  // added to the sums.
  void end_backward(int64_t micro_batch, bool direct);
  void abort_backward();
  // Returns the flags that gradients of this backward have set, and clears them. Waits for the
  // device.
  std::vector<int64_t> take_arrivals();
  // The gradient of flag k was dropped.
  void clear(int64_t k);

  // Clears the flags of sums that the user wrote to; the sums are searched anew afterwards.
  void forget_sums(const std::vector<int64_t>& flags);
  // int64 [2]: 1 if no sum of `flags` holds NaN or Inf, else 0; and the first NaN record.
  at::Tensor verdict(const std::vector<int64_t>& flags);

 private:
  static int32_t* pointer(at::Tensor& flags, int64_t k) {
    return flags.mutable_data_ptr<int32_t>() + k;
  }
  at::Tensor index(const std::vector<int64_t>& flags) const;
  void zero_sums(const std::vector<int64_t>& flags);
  void apply_clears();
  bool is_all(const std::vector<int64_t>& flags) const {
    return static_cast<int64_t>(flags.size()) == count_;
  }

  c10::Device device_;
  int64_t rank_;
  int64_t count_ = 0;
  at::Tensor arrivals_;  // int32 [count]
  at::Tensor sums_;      // int32 [count]
  at::Tensor first_;     // int64 [count], the first NaN record of each flag
  at::Tensor codes_;     // int64 [count], NaN records in micro-batch 0
  // Memory for end_backward(), allocated early because a backward cannot be undone there: int64,
  // bool.
  at::Tensor seen_;
  at::Tensor unseen_;
  std::vector<int64_t> cleared_;
  std::vector<uint8_t> is_cleared_;  // [count]
};

}  // namespace zero_ext
