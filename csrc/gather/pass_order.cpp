#include "gather/pass_order.h"

#include <algorithm>

namespace zero_ext {

void PassOrder::begin(Pass pass) {
  Sequence& sequence = of(pass);
  if (pass == Pass::backward && sequence.last.empty()) {
    const std::vector<int64_t>& forward = of(Pass::forward).last;
    sequence.last.assign(forward.rbegin(), forward.rend());
  }
  sequence.current.clear();
  sequence.position = 0;
  sequence.under_way = true;
}

void PassOrder::enter(Pass pass, int64_t unit) {
  Sequence& sequence = of(pass);
  if (!sequence.under_way) return;
  if (sequence.current.empty() || sequence.current.back() != unit) sequence.current.push_back(unit);
  const auto begin = sequence.last.begin();
  const auto from = begin + static_cast<int64_t>(sequence.position);
  const auto found = std::find(from, sequence.last.end(), unit);
  if (found != sequence.last.end()) sequence.position = found - begin + 1;
}

void PassOrder::end(Pass pass) {
  Sequence& sequence = of(pass);
  if (!sequence.under_way) return;
  sequence.last.swap(sequence.current);
  sequence.under_way = false;
}

std::span<const int64_t> PassOrder::upcoming(Pass pass) const {
  const Sequence& sequence = of(pass);
  if (!sequence.under_way) return {};
  return std::span(sequence.last).subspan(sequence.position);
}

bool PassOrder::ends_forward(int64_t unit) const {
  const std::vector<int64_t>& order = of(Pass::forward).last;
  return order.size() > 1 && order.back() == unit;
}

}  // namespace zero_ext
