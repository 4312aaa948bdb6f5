#include "reduce/reduction_order.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace zero_ext {
namespace {

// A unit whose message is that much smaller than the largest comes last at first.
constexpr int64_t kSmall = 64;
constexpr size_t kNever = std::numeric_limits<size_t>::max();

}  // namespace

void ReductionOrder::guess(const std::vector<int64_t>& message_bytes) {
  learned_ = false;
  order_.resize(message_bytes.size());
  std::iota(order_.begin(), order_.end(), 0);
  if (order_.empty()) return;
  const int64_t largest = *std::max_element(message_bytes.begin(), message_bytes.end());
  std::stable_partition(order_.begin(), order_.end(),
                        [&](int64_t u) { return message_bytes[u] * kSmall > largest; });
}

void ReductionOrder::learn(std::vector<int64_t> order) {
  order_ = std::move(order);
  learned_ = true;
}

void ReductionOrder::begin(int64_t early) {
  early_ = early;
  next_ = 0;
  completed_ = 0;
  completed_at_.assign(order_.size(), kNever);
}

void ReductionOrder::complete(int64_t u) {
  if (completed_at_[u] == kNever) completed_at_[u] = completed_++;
}

bool ReductionOrder::is_near(int64_t u, size_t turns) const {
  const size_t end = std::min(next_ + turns, early_);
  return next_ < end &&
         std::find(order_.begin() + next_, order_.begin() + end, u) != order_.begin() + end;
}

std::vector<int64_t> ReductionOrder::completed() const {
  if (completed_ == 0) return {};
  std::vector<int64_t> units = order_;
  std::stable_sort(units.begin(), units.end(),
                   [this](int64_t a, int64_t b) { return completed_at_[a] < completed_at_[b]; });
  return units;
}

}  // namespace zero_ext
