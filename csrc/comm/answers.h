// Answers: what the ranks tell each other in an agreement, as structs with named fields.
//
// A struct of int64 fields alone travels as so many numbers. Every rank's message has all fields.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace zero_ext {

template <typename Answer>
constexpr int64_t answer_length() {
  static_assert(std::is_trivially_copyable_v<Answer> && std::is_standard_layout_v<Answer>);
  static_assert(sizeof(Answer) % sizeof(int64_t) == 0);
  return sizeof(Answer) / sizeof(int64_t);
}

// int64 [fields] on the host.
template <typename Answer>
at::Tensor message_of(const Answer& answer) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(at::kCPU);
  const at::Tensor message = at::empty({answer_length<Answer>()}, options);
  std::memcpy(message.mutable_data_ptr<int64_t>(), &answer, sizeof(Answer));
  return message;
}

// Of [world, fields] on the host, contiguous: the answer of each rank.
template <typename Answer>
std::vector<Answer> answers_of(const at::Tensor& messages) {
  std::vector<Answer> answers(messages.size(0));
  std::memcpy(static_cast<void*>(answers.data()), messages.const_data_ptr<int64_t>(),
              messages.nbytes());
  return answers;
}

}  // namespace zero_ext
