#include "engine/serving.h"

#include <ATen/ops/tensor.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "comm/answers.h"
#include "core/errors.h"

namespace zero_ext {
bool Serving::serve(const Access& access) {
  const int64_t whom = reductions_.who_began();
  if (whom >= 0) serve(access, whom);
  return whom >= 0;
}

void Serving::serve(const Access& access, int64_t whom) {
  const auto begin = std::chrono::steady_clock::now();
  const bool threw = backward_.threw(access);
  try {
    backward_.take_part_in_others_backward(access);
  } catch (const std::exception&) {
    // On a device no rank waits for another one in a backward: the error is this rank's own.
    if (comm_.way().queued || !reductions_.others_left()) throw;
    backward_.check_usable(access, "step()");
    if (!threw) backward_.forget_failure(access);  // another rank's backward
  }
  count(whom, 1, std::chrono::steady_clock::now() - begin);
}

bool Serving::serve_shown(const Access& access, const GatherOrder::Shown& shown) {
  if (reductions_.started() >= shown.reductions) return false;
  const auto begin = std::chrono::steady_clock::now();
  const int64_t backwards = backward_.count();
  while (reductions_.started() < shown.reductions) backward_.take_part_in_others_reduction(access);
  count(shown.rank, backward_.count() - backwards, std::chrono::steady_clock::now() - begin);
  return true;
}

void Serving::count(int64_t whom, int64_t backwards, std::chrono::steady_clock::duration time) {
  Served& served = served_[comm_.global_rank(whom)];
  served.backwards += backwards;
  served.time += std::chrono::duration_cast<std::chrono::microseconds>(time);
}

Serving::Met Serving::meet(const Access& access, Comm::Agreement about, const Arrival& own) {
  return meet(access, about, own, [&] {
    const std::string verb = Comm::name_of(about);
    return where(context_.global_rank) + verb + " waited for the other ranks' " + verb;
  });
}

Serving::Met Serving::meet(const Access& access, Comm::Agreement about, Arrival own,
                           const std::function<std::string()>& what) {
  const bool on_device = comm_.way().queued;
  gatherer_.begin_serving();
  const auto end = c10::make_scope_exit([this] { gatherer_.end_serving(); });
  std::optional<CollectiveWatch::HostWait> waiting;
  if (comm_.watch() != nullptr) {
    waiting.emplace(comm_.watch(), what(), [this] { gatherer_.serve(); });
  }
  // On a device its local sums may have another dtype than what the others send.
  const bool serves = !on_device || own.micro_batches != MicroBatches::unreduced;
  BackwardWatch& watch = backward_.watch(access);
  own.gathers = gatherer_.entered();
  own.reductions = reductions_.started();
  own.completed_one = watch.completed_one() ? 1 : 0;
  own.saw_inner = watch.saw_inner_backwards() ? 1 : 0;
  finished_.begin_agreement();
  try {
    const at::Tensor messages = comm_.all_gather(about, message_of(own), what, [&] {
      if (waiting.has_value()) comm_.watch()->raise_if_ranks_wait();
      const bool served = serves && serve_one(access);
      if (served && waiting.has_value()) waiting->begin_again();
      return served;
    });
    const auto arrivals = answers_of<Arrival>(messages);
    const bool values_differ = std::any_of(arrivals.begin(), arrivals.end(), [&](const auto& each) {
      return each.values != arrivals.front().values;
    });
    const int64_t unreduced = rank_with(MicroBatches::unreduced, arrivals);
    if (unreduced >= 0) return {.incomplete = unreduced, .values_differ = values_differ};
    if (on_device) {
      catch_up(access, arrivals);
      learn_from(access, about, arrivals);
    }
    return {.incomplete = rank_with(MicroBatches::too_few, arrivals),
            .values_differ = values_differ};
  } catch (...) {
    backward_.give_up_others_backward(access);
    throw;
  }
}

void Serving::learn_from(const Access& access, Comm::Agreement about,
                         const std::vector<Arrival>& arrivals) {
  BackwardWatch& watch = backward_.watch(access);
  const Arrival& first = arrivals.front();
  bool differ = false;
  for (const Arrival& each : arrivals) {
    // All ranks start their reductions as early, or all at the end of a backward. Otherwise one would
    // wait for a gather behind a reduction, and another one the other way round.
    if (each.completed_one != 0) watch.note_completed();
    if (each.saw_inner != 0) watch.expect_inner_backwards();
    differ = differ || each.epoch != first.epoch || each.reductions != first.reductions ||
             each.which != first.which;
  }
  if (!differ || !comm_.way().one_host) return;
  const std::string verb = Comm::name_of(about);
  // A rank that had to catch up has finished more than its arrival says.
  const at::Tensor finished = at::tensor({finished_.which(), finished_.count()}, at::kLong);
  const auto what = [&] {
    return where(context_.global_rank) + verb + " waited for the other ranks' " + verb;
  };
  check_same(verb, comm_.all_gather(about, finished, what), arrivals);
}

int64_t Serving::rank_with(MicroBatches micro_batches, const std::vector<Arrival>& arrivals) const {
  const auto found = std::find_if(arrivals.begin(), arrivals.end(), [&](const Arrival& each) {
    return each.micro_batches == micro_batches;
  });
  return found == arrivals.end() ? -1 : comm_.global_rank(found - arrivals.begin());
}

void Serving::check_same(const std::string& verb, const at::Tensor& finished,
                         const std::vector<Arrival>& arrivals) const {
  const at::Tensor which = finished.select(1, 0);
  if (which.eq(which[0]).all().item<bool>()) return;
  const at::Tensor count = finished.select(1, 1);
  const int64_t fewest = count.min().item<int64_t>();
  std::vector<int64_t> threw;
  std::vector<int64_t> zeroed;
  for (int64_t r = 0; r < context_.world; ++r) {
    if (arrivals[r].lost != 0) threw.push_back(comm_.global_rank(r));
    if (count[r].item<int64_t>() == fewest) zeroed.push_back(comm_.global_rank(r));
  }
  std::string cause = "they called zero_grad() after different ones";
  if (!threw.empty()) {
    cause = c10::str("one threw on rank ", c10::Join(", ", threw),
                     " after the others had its gradients");
  } else if (std::ssize(zeroed) < context_.world) {
    cause = c10::str("rank ", c10::Join(", ", zeroed),
                     " called zero_grad() after a backward that another rank had not run, or threw"
                     " in before its first gradient");
  }
  TORCH_CHECK(false, where(context_.global_rank), verb,
              ": the ranks have finished different backwards since the last step: ", cause,
              ". Call zero_grad(set_to_none=True) on every rank and repeat the step's backwards.");
}

bool Serving::serve_one(const Access& access) {
  const auto& order = comm_.gather_order();
  if (order == nullptr) return serve(access);
  // Before the gathers: what was gathered before these reductions is queued before them.
  const GatherOrder::Shown shown = order->most_reductions();
  const bool gathered = gatherer_.serve();
  return serve_shown(access, shown) || gathered;
}

void Serving::catch_up(const Access& access, const std::vector<Arrival>& arrivals) {
  if (!comm_.way().one_host) return;
  const auto most = [&](auto field) {
    return std::max_element(arrivals.begin(), arrivals.end(),
                            [&](const auto& a, const auto& b) { return a.*field < b.*field; });
  };
  const auto first = arrivals.begin() + context_.first_of_replica();
  const auto [fewest_gathers, most_gathers] =
      std::minmax_element(first, first + context_.shards,
                          [](const auto& a, const auto& b) { return a.gathers < b.gathers; });
  gatherer_.serve_until(most_gathers->gathers);
  if (fewest_gathers->gathers < most_gathers->gathers) gatherer_.forget_order();
  const auto reductions = most(&Arrival::reductions);
  if (comm_.gather_order() != nullptr)
    serve_shown(access, {reductions->reductions, reductions - arrivals.begin()});
  const auto epoch = most(&Arrival::epoch);
  while (finished_.epoch() < epoch->epoch) serve(access, epoch - arrivals.begin());
}

}  // namespace zero_ext
