// Transfer: a message that this rank sends or receives.
//
// Owner: its MessageWork; the transport, as long as it is under way.
// Threads: under the transport's mutex; `peer`, `label` and `sending` are constant.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "comm/local/ring.h"
#include "comm/message.h"

namespace zero_ext {

struct Transfer {
  static constexpr int64_t kWhole = -1;

  at::Tensor tensor;  // undefined when it has ended
  int64_t peer;
  MessageLabel label;
  bool sending = false;
  int64_t offset = kWhole;  // of the first byte, where a part of the message is received
  bool done = false;
  std::string error = {};

  // One number for kind and tag.
  uint64_t tag() const {
    return kMessageKinds * static_cast<uint64_t>(label.tag) + static_cast<uint64_t>(label.kind);
  }
  // What its receiver needs to read it.
  Record record(Record::Kind kind, uint64_t number) const {
    return {.kind = kind,
            .number = number,
            .tag = tag(),
            .address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()),
            .bytes = tensor.nbytes()};
  }
};

}  // namespace zero_ext
