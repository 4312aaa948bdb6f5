// ReductionOrder: which unit is reduced next, and how far a backward has come with that. Knows no
// tensors and no ranks. See Note [Reduction order] in reductions.h.
//
// Owner:     Reductions.
// Threads:   called only under the engine's lock.
// Invariant: the order holds each unit once, and is the same on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zero_ext {

class ReductionOrder {
 public:
  int64_t units() const { return static_cast<int64_t>(order_.size()); }
  // The first order, of as many units as there are messages: small ones last.
  void guess(const std::vector<int64_t>& message_bytes);
  // The order from now on.
  void learn(std::vector<int64_t> order);
  bool is_learned() const { return learned_; }

  // A backward begins; as many units as `early` may start before it ends.
  void begin(int64_t early);
  // All awaited gradients of unit u have arrived.
  void complete(int64_t u);
  // Starting: next() is the unit to be reduced next, unless none may start now.
  bool has_next() const { return next_ < early_; }
  int64_t next() const { return order_[next_]; }
  bool is_at_last() const { return next_ + 1 == order_.size(); }
  void advance() { ++next_; }
  // Unit u is among the next `turns` that may start.
  bool is_near(int64_t u, size_t turns) const;
  // The backward ends: every unit may start.
  void end() { early_ = order_.size(); }
  bool all_started() const { return next_ == order_.size() && !order_.empty(); }

  const std::vector<int64_t>& order() const { return order_; }
  // The units as they became complete in this backward, those that did not last; empty where none
  // did.
  std::vector<int64_t> completed() const;

 private:
  std::vector<int64_t> order_;  // [units]
  bool learned_ = false;
  size_t early_ = 0;
  size_t next_ = 0;                   // of order_
  std::vector<size_t> completed_at_;  // [units]: as many were complete before it, if it was
  size_t completed_ = 0;
};

}  // namespace zero_ext
