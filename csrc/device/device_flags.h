// DeviceFlags: where kernels on a device saw NaN or Inf. Only the device knows it: a step's verdict
// is computed from the flags on the device, and the host waits for nothing.
//
// Owner:     NanRecords.
// Threads:   called only under Engine::mutex_; everything is queued on the current stream.
// Invariant: flag k belongs to the k-th slot, counted over all units.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace zero_ext {

// A NaN record: where NaN or Inf was seen, as one number. Records are ordered by micro-batch, then
// rank, then parameter.
namespace nan_record {
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
// In place of a record: the ranks' sums are not of the same backwards.
constexpr int64_t kOutOfStep = kNone - 1;
// The sum overflowed, and no single gradient did.
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

  // One more flag for each of these parameters, from count() on.
  void add(const std::vector<int64_t>& parameters);
  int64_t count() const { return count_; }

  // For kernels to set, where a gradient of this rank or a reduced sum holds NaN or Inf.
  int32_t* arrival(int64_t k) { return pointer(arrivals_, k); }
  int32_t* sum(int64_t k) { return pointer(sums_, k); }

  void begin_backward() { apply_clears(); }
  // The flagged gradients of this backward become NaN records. `direct`: they went into the sums.
  void end_backward(int64_t micro_batch, bool direct);
  void abort_backward();
  // The flagged gradients of this backward, on the host; waits for the device.
  std::vector<int64_t> take_arrivals();
  // The gradient of flag k is gone.
  void clear(int64_t k);

  // Clears the flags of these sums: the user wrote to them, and they are searched next.
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
  at::Tensor first_;     // int64 [count], NaN records
  at::Tensor codes_;     // int64 [count], the records of micro-batch 0
  // Memory for the end of a backward, which cannot be undone any more: int64, bool.
  at::Tensor seen_;
  at::Tensor unseen_;
  std::vector<int64_t> cleared_;
  std::vector<uint8_t> is_cleared_;  // [count]
};

}  // namespace zero_ext
