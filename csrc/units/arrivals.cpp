#include "units/arrivals.h"

#include <algorithm>
#include <utility>

namespace zero_ext {

void Arrivals::begin(const std::vector<uint8_t>& expected) {
  expected_ = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const bool is_expected = expected[i] != 0;
    slots_[i] = {.awaited = is_expected ? 1 : 0,
                 .last_hidden = slots_[i].last_hidden,
                 .expected = is_expected};
    if (is_expected) ++expected_;
  }
  awaited_ = expected_;
  modules_left_ = 0;
  modules_awaited_ = 0;
  reduced_ = false;
  late_ = false;
}

void Arrivals::await_hidden(const std::vector<uint8_t>& trained, int64_t modules) {
  const auto hidden = [&](size_t i) {
    if (remembers_) return slots_[i].last_hidden;
    return trained[i] != 0 && !slots_[i].expected ? 1 : 0;
  };
  int64_t all = 0;
  for (size_t i = 0; i < slots_.size(); ++i) all += hidden(i);
  if (all == 0) return;
  modules_awaited_ = remembers_ ? last_modules_left_ : modules;
  if (modules_awaited_ > 0) return;
  for (size_t i = 0; i < slots_.size(); ++i) slots_[i].awaited += hidden(i);
  awaited_ += all;
}

void Arrivals::reach(int64_t i) {
  SlotArrivals& slot = slots_[i];
  if (std::exchange(slot.expected, false)) {
    --expected_;
  } else {
    ++slot.hidden;
  }
  if (slot.awaited > 0) {
    --slot.awaited;
    --awaited_;
  }
}

bool Arrivals::fill(int64_t i) {
  SlotArrivals& slot = slots_[i];
  slot.late = slot.late || reduced_;
  late_ = late_ || reduced_;
  return !std::exchange(slot.filled, true);
}

void Arrivals::leave_module() {
  ++modules_left_;
  if (modules_awaited_ > 0) --modules_awaited_;
}

void Arrivals::reopen_for_late_gradients() {
  reduced_ = false;
  for (SlotArrivals& slot : slots_) slot.filled = slot.late;
}

void Arrivals::close() { expected_ = awaited_ = modules_awaited_ = 0; }

void Arrivals::remember() {
  remembers_ = true;
  last_modules_left_ = modules_left_;
  for (SlotArrivals& slot : slots_) slot.last_hidden = slot.hidden;
}

}  // namespace zero_ext
