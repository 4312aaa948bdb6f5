#include "reduce/slot_users.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "comm/host_wait.h"
#include "core/errors.h"

namespace zero_ext {

void SlotUsers::add(Unit& unit) {
  units_.push_back(&unit);
  for (int64_t i = 0; i < unit.layout().size(); ++i) {
    const bool uses = unit.intake().contributes(i);
    used_.push_back(uses ? 1 : 0);
    uses_all_ = uses_all_ && uses;
  }
}

void SlotUsers::start(const Late& own, int32_t steps) {
  const SideStream::Scope beside(context_.reducing);
  late_units_ = std::ssize(own.units);
  used_.insert(used_.end(), own.units.begin(), own.units.end());
  used_.push_back(own.gave_up ? 1 : 0);
  used_.push_back(steps_ = steps);
  const auto count = std::ssize(used_);
  const bool on_device = comm_.way().queued;
  const auto options = at::TensorOptions().dtype(at::kInt);
  if (knows_answer()) {
    counts_ = at::ones({count}, options.device(context_.compute.device()));
  } else {
    counts_ = at::empty({count}, options.pinned_memory(on_device));
    std::copy(used_.begin(), used_.end(), counts_.mutable_data_ptr<int32_t>());
    if (on_device) counts_ = counts_.to(context_.compute.device(), /*non_blocking=*/true);
  }
  comm_.all_reduce_sum(counts_, counting_);
}

SlotUsers::Late SlotUsers::finish(int64_t backward) {
  const SideStream::Scope beside(context_.reducing);
  counting_.wait([&] {
    return where(context_.global_rank) +
           "waited for the other ranks' counts of used parameters in backward " +
           std::to_string(backward);
  });
  // Where the answer is known, nobody waits for the device.
  if (!knows_answer()) wait_for_stream(context_.compute.device(), comm_.watch().get());
  const at::Tensor counts = knows_answer() ? at::ones({counts_.numel()}, at::kInt) : counts_.cpu();
  const auto* count = counts.const_data_ptr<int32_t>();
  for (Unit* unit : units_) {
    for (int64_t i = 0; i < unit->layout().size(); ++i) {
      if (*count++ > 0) unit->sums().mark_summed(i);
    }
  }
  counts_.reset();
  TORCH_CHECK(comm_.way().queued || count[late_units_ + 1] == comm_.world() * steps_,
              where(context_.global_rank), "another rank", kOtherSteps);
  Late late{.units = {}, .gave_up = late_units_ > 0 && count[late_units_] > 0};
  for (int64_t u = 0; u < late_units_; ++u) late.units.push_back(count[u] > 0 ? 1 : 0);
  return late;
}

void SlotUsers::clear() {
  units_.clear();
  used_.clear();
  uses_all_ = true;
}

AbandonedReduction SlotUsers::abandon() {
  return {std::exchange(counting_, Pending()), nullptr, {std::exchange(counts_, at::Tensor())}};
}

}  // namespace zero_ext
