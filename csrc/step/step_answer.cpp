#include "step/step_answer.h"

#include <algorithm>

namespace zero_ext {

Completeness completeness_of(const std::vector<Arrival>& arrivals) {
  // The last rank with these micro-batches.
  const auto rank_with = [&](MicroBatches micro_batches) {
    int64_t rank = -1;
    for (size_t r = 0; r < arrivals.size(); ++r) {
      if (arrivals[r].micro_batches == micro_batches) rank = static_cast<int64_t>(r);
    }
    return rank;
  };
  const bool any_complete = rank_with(MicroBatches::complete) >= 0;
  return {.unreduced = rank_with(MicroBatches::unreduced),
          .too_few = any_complete ? -1 : rank_with(MicroBatches::too_few),
          .changed_too_early = rank_with(MicroBatches::changed_too_early)};
}

}  // namespace zero_ext
