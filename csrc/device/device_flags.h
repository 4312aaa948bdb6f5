// DeviceFlags: where kernels on a device saw NaN or Inf, known to the device alone. Nobody waits
// for them: a step's verdict is computed from them on the device.
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

// A NaN record of NaN or Inf as one number that orders them: by micro-batch, then rank, then
// parameter.
namespace nan_record {
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
// No NaN record: the ranks' sums are not of the same backwards.
constexpr int64_t kOutOfStep = kNone - 1;
// Where the sum overflowed and no single gradient did.
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

  // For kernels to set: a gradient of this rank, a reduced sum.
  int32_t* arrival(int64_t k) { return pointer(arrivals_, k); }
  int32_t* sum(int64_t k) { return pointer(sums_, k); }

  void begin_backward() { apply_clears(); }
  // What arrived in this backward becomes a NaN record. `direct`: it went into the sums.
  void end_backward(int64_t micro_batch, bool direct);
  void abort_backward();
  // The arrivals of this backward, on the host; waits.
  std::vector<int64_t> take_arrivals();
  // The gradient of flag k is gone.
  void clear(int64_t k);

  // What was seen in these sums holds no longer: the user wrote to them, and they are searched
  // next.
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
  at::Tensor first_;     // int64 [count], sightings
  at::Tensor codes_;     // int64 [count], sightings in micro-batch 0
  // Memory for the end of a backward, which cannot be undone where that runs out: int64, bool.
  at::Tensor seen_;
  at::Tensor unseen_;
  std::vector<int64_t> cleared_;
  std::vector<uint8_t> is_cleared_;  // [count]
};

}  // namespace zero_ext
