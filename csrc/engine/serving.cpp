#include "engine/serving.h"

#include <ATen/ops/tensor.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <vector>

#include "core/errors.h"

namespace zero_ext {
namespace {

// What a rank tells the others when it comes to a step on a device.
enum Told : int64_t {
  kEpoch,
  kGathers,
  kReductions,
  kLost,
  kMicroBatches,
  kCompletedOne,
  kSawInner
};

}  // namespace

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
    if (comm_.on_device() || !reductions_.others_left()) throw;
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

int64_t Serving::meet(const Access& access, Comm::Agreement about, MicroBatches micro_batches) {
  const std::string verb = Comm::name_of(about);
  const auto what = [&] {
    return where(context_.global_rank) + verb + " waited for the other ranks' " + verb;
  };
  gatherer_.begin_serving();
  const auto end = c10::make_scope_exit([this] { gatherer_.end_serving(); });
  const CollectiveWatch::HostWait waiting(comm_.watch(), what(), [this] { gatherer_.serve(); });
  // Its local sums may have another dtype than what the others send.
  const bool serves = micro_batches != MicroBatches::unreduced;
  BackwardWatch& watch = backward_.watch(access);
  const std::vector<int64_t> mine{finished_.epoch(),
                                  gatherer_.entered(),
                                  reductions_.started(),
                                  finished_.lost(),
                                  static_cast<int64_t>(micro_batches),
                                  watch.completed_one() ? 1 : 0,
                                  watch.saw_inner_backwards() ? 1 : 0};
  try {
    const at::Tensor of_all = comm_.all_gather(about, at::tensor(mine, at::kLong), what, [&] {
      comm_.watch()->raise_if_ranks_wait();
      const bool served = serves && serve_one(access);
      if (served) waiting.begin_again();
      return served;
    });
    const int64_t unreduced = who_told(of_all, MicroBatches::unreduced);
    if (unreduced >= 0) return unreduced;
    catch_up(access, of_all);
    // All ranks start their reductions as early, or all at the end of a backward. Otherwise one would
    // wait for a gather behind a reduction, and another one the other way round.
    if (of_all.select(1, kCompletedOne).any().item<bool>()) watch.note_completed();
    if (of_all.select(1, kSawInner).any().item<bool>()) watch.expect_inner_backwards();
    const at::Tensor lost = of_all.select(1, kLost);
    if (!lost.eq(lost[0]).all().item<bool>()) {
      const at::Tensor which = at::tensor({finished_.which()}, at::kLong);
      check_same(verb, comm_.all_gather(about, which, what), lost);
    }
    return who_told(of_all, MicroBatches::too_few);
  } catch (...) {
    backward_.give_up_others_backward(access);
    throw;
  }
}

int64_t Serving::who_told(const at::Tensor& of_all, MicroBatches micro_batches) const {
  for (int64_t r = 0; r < context_.world; ++r) {
    if (of_all[r][kMicroBatches].item<int64_t>() == static_cast<int64_t>(micro_batches))
      return comm_.global_rank(r);
  }
  return -1;
}

void Serving::check_same(const std::string& verb, const at::Tensor& which,
                         const at::Tensor& lost) const {
  std::vector<int64_t> ranks;
  for (int64_t r = 0; r < context_.world; ++r) {
    if (lost[r].item<int64_t>() != 0) ranks.push_back(comm_.global_rank(r));
  }
  TORCH_CHECK(
      which.eq(which[0]).all().item<bool>(), where(context_.global_rank), verb,
      ": the ranks have finished different backwards since the last step: one threw on rank ",
      c10::Join(", ", ranks),
      " after the others had its gradients. Call zero_grad(set_to_none=True) on every rank and"
      " repeat the step's backwards.");
}

bool Serving::serve_one(const Access& access) {
  const auto& order = comm_.gather_order();
  if (order == nullptr) return serve(access);
  // Before the gathers: what was gathered before these reductions is queued before them.
  const GatherOrder::Shown shown = order->most_reductions();
  const bool gathered = gatherer_.serve();
  return serve_shown(access, shown) || gathered;
}

void Serving::catch_up(const Access& access, const at::Tensor& of_all) {
  const at::Tensor gathers =
      of_all.select(1, kGathers).narrow(0, context_.first_of_replica(), context_.shards);
  const auto most = gathers.max().item<int64_t>();
  gatherer_.serve_until(most);
  if (gathers.min().item<int64_t>() < most) gatherer_.forget_order();
  const auto [started, who] = of_all.select(1, kReductions).max(0);
  if (comm_.gather_order() != nullptr)
    serve_shown(access, {started.item<int64_t>(), who.item<int64_t>()});
  const auto [epoch, whom] = of_all.select(1, kEpoch).max(0);
  while (finished_.epoch() < epoch.item<int64_t>()) serve(access, whom.item<int64_t>());
}

}  // namespace zero_ext
