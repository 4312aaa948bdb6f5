// Arrivals: which gradients of a unit have arrived in one backward, and which are still awaited.
// Knows no tensors and no ranks.
//
// Owner:     one Unit.
// Threads:   called only under the engine's lock.
// Invariant: complete() means that no awaited gradient is missing and every awaited module was
//            left. Gradients may arrive afterwards all the same: those are late once the unit was
//            reduced.
//
// Expected gradients are those that the running graph shows. For hidden and late ones see
// Note [Late gradients] in reduce/reductions.h.
#pragma once

#include <cstdint>
#include <vector>

namespace zero_ext {

class Arrivals {
 public:
  explicit Arrivals(int64_t slots) : slots_(slots) {}

  // A backward begins. `expected[i]`: its graph shows a gradient of slot i.
  void begin(const std::vector<uint8_t>& expected);
  // Right after begin(): hidden gradients are possible. `trained[i]`: slot i is not frozen.
  // `modules`: how many modules are gathered with this unit alone.
  void await_hidden(const std::vector<uint8_t>& trained, int64_t modules);
  // Autograd reached slot i, with a gradient or without one.
  void reach(int64_t i);
  // Slot i was reached with a gradient. Returns whether it is the slot's first one.
  bool fill(int64_t i);
  // The backward has left one of the unit's modules.
  void leave_module();
  // The unit is reduced: gradients that arrive from now on are late.
  void start_reduction() { reduced_ = true; }
  // All units were reduced, and the late gradients are next: the slots' gradients are those alone.
  void reopen_for_late_gradients();
  // No gradient arrives any more in this backward.
  void close();
  // After a backward: the next one awaits as many hidden gradients and modules as this one had.
  void remember();

  bool complete() const { return awaited_ == 0 && modules_awaited_ == 0; }
  // A gradient that the graph shows has not arrived yet.
  bool expects_any() const { return expected_ > 0; }
  bool has_gradient(int64_t i) const { return slots_[i].filled; }
  bool reduced() const { return reduced_; }
  bool late() const { return late_; }

 private:
  struct SlotArrivals {
    int32_t awaited = 0;
    int32_t hidden = 0;       // gradients beyond the expected one that have arrived
    int32_t last_hidden = 0;  // in the last backward that was remembered
    bool expected = false;    // and not arrived yet
    bool filled = false;
    bool late = false;  // a late gradient has arrived
  };

  std::vector<SlotArrivals> slots_;
  int64_t expected_ = 0;  // slots
  int64_t awaited_ = 0;   // gradients, of all slots
  int64_t modules_left_ = 0;
  int64_t modules_awaited_ = 0;
  int64_t last_modules_left_ = 0;  // in the last backward that was remembered
  bool remembers_ = false;         // a backward was remembered
  bool reduced_ = false;
  bool late_ = false;
};

}  // namespace zero_ext
