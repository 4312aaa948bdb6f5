// SharedEpochs: what one rank shows to its local peers about its epochs, see Note [Epochs] in
// message.h. In shared memory, zero at first.
//
// Threads: its owner writes; any process that has mapped it reads.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/message.h"

namespace zero_ext {

class SharedEpochs {
 public:
  // The owner's. It begins `epoch`.
  void show_begun(MessageKind kind, int64_t epoch) { at(begun_, kind).store(epoch + 1); }
  // All messages of epochs before `epoch` that it will ever send have been sent.
  void show_past(MessageKind kind, int64_t epoch) {
    std::atomic<int64_t>& shown = at(past_, kind);
    if (shown.load(std::memory_order_relaxed) != epoch) shown.store(epoch);
  }
  // It reads no more messages of `epoch`; it abandons `epoch`.
  void drop(MessageKind kind, int64_t epoch) { at(dropped_, kind).store(epoch + 1); }
  void abandon(MessageKind kind, int64_t epoch) { at(abandoned_, kind).store(epoch + 1); }

  // The peers'.
  bool is_past(MessageKind kind, int64_t epoch) const { return epoch < at(past_, kind); }
  bool drops(const MessageLabel& label) const { return label.epoch < at(dropped_, label.kind); }
  bool has_begun(MessageKind kind, int64_t epoch) const { return epoch < at(begun_, kind); }
  // The first epoch that its owner has not abandoned, nor a later one.
  int64_t after_abandoned(MessageKind kind) const { return at(abandoned_, kind); }

  // The owner's last one.
  int64_t last_begun(MessageKind kind) const { return at(begun_, kind) - 1; }

 private:
  // Of each kind, one after the last epoch of which it is true.
  using Bounds = std::array<std::atomic<int64_t>, kMessageKinds>;
  static std::atomic<int64_t>& at(Bounds& bounds, MessageKind kind) {
    return bounds[static_cast<size_t>(kind)];
  }
  static int64_t at(const Bounds& bounds, MessageKind kind) {
    return bounds[static_cast<size_t>(kind)].load();
  }

  Bounds begun_;
  Bounds past_;
  Bounds abandoned_;
  Bounds dropped_;
};

}  // namespace zero_ext
