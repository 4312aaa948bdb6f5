#include "units/changed_part.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "kernels/changes.h"

namespace zero_ext {
namespace {

constexpr int64_t kWhole = -1;
constexpr int64_t kElementBytes = 2;
constexpr int64_t kHeadBytes = sizeof(int64_t);

int64_t bytes_of_marks(int64_t numel) {
  return kernels::mark_words(numel) * static_cast<int64_t>(sizeof(uint16_t));
}

at::Tensor pack(const at::Tensor& part, const uint16_t* marks) {
  const int64_t numel = part.numel();
  int64_t count = marks == nullptr ? numel : kernels::count_marks(marks, numel);
  int64_t bytes = bytes_of_marks(numel) + count * kElementBytes;
  if (bytes >= numel * kElementBytes) {
    count = kWhole;
    bytes = numel * kElementBytes;
  }
  const at::Tensor message = at::empty({kHeadBytes + bytes}, at::kByte);
  auto* const to = message.mutable_data_ptr<uint8_t>();
  std::memcpy(to, &count, kHeadBytes);
  if (count == kWhole) {
    std::memcpy(to + kHeadBytes, part.const_data_ptr(), bytes);
  } else {
    auto* const copied = reinterpret_cast<uint16_t*>(to + kHeadBytes);
    std::memcpy(copied, marks, bytes_of_marks(numel));
    kernels::pack_marked(marks, numel, static_cast<const uint16_t*>(part.const_data_ptr()),
                         copied + kernels::mark_words(numel));
  }
  return message;
}

void unpack(const at::Tensor& message, const at::Tensor& part) {
  const auto* const from = message.const_data_ptr<uint8_t>();
  int64_t count = 0;
  std::memcpy(&count, from, kHeadBytes);
  const int64_t numel = part.numel();
  if (count == kWhole) {
    std::memcpy(part.mutable_data_ptr(), from + kHeadBytes, numel * kElementBytes);
    return;
  }
  const auto* const marks = reinterpret_cast<const uint16_t*>(from + kHeadBytes);
  TORCH_INTERNAL_ASSERT(kernels::count_marks(marks, numel) == count);
  kernels::unpack_marked(marks, numel, marks + kernels::mark_words(numel),
                         static_cast<uint16_t*>(part.mutable_data_ptr()));
}

}  // namespace

PackedRange packed_changes(const at::Tensor& part, const uint16_t* marks) {
  return {.own = pack(part, marks),
          .most_bytes = kHeadBytes + part.numel() * kElementBytes,
          .unpack = unpack};
}

}  // namespace zero_ext
