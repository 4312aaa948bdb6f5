#include "reduce/reductions.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/range.h"

namespace zero_ext {

int64_t Reductions::who_began() {
  return needs_notices() ? notices_.who_began_after(finished_.epoch(), finished_.agreements())
                         : comm_.who_began(Comm::Kind::reduction, finished_.epoch() + 1);
}

bool Reductions::is_first() const {
  const auto& units = parameters_.units();
  return finished_.none_since_step() && std::none_of(units.begin(), units.end(), [](const auto& u) {
           return u->sums().has_reduced();
         });
}

void Reductions::reserve_messages() {
  if (comm_.peer_memory() == nullptr) return;
  int64_t most = 0;
  for (const auto& unit : parameters_.units()) {
    if (&unit->ranks().comm == &comm_) most = std::max(most, unit->layout().padded_numel());
  }
  comm_.peer_memory()->reserve(most * static_cast<int64_t>(sizeof(float)), context_.memory);
}

void Reductions::begin(float scale, bool hidden) {
  announced_ = needs_notices() && !is_first();
  scale_ = scale;
  finished_.set_epoch(comm_.next_epoch(Comm::Kind::reduction, finished_.epoch()));
  if (announced_) notices_.send(finished_.epoch(), finished_.agreements());
  comm_.note_backwards(finished_.count() + 1);
  // Collectives have no numbers: their order alone says which ones belong together.
  const bool numbered = UnitReduction::brings_flags(context_, comm_);
  backward_ = numbered ? finished_.epoch() : started_;
  in_epoch_ = true;
  all_started_ = false;
  users_.clear();
  const int64_t units = parameters_.unit_count();
  if (order_.units() != units) {
    std::vector<int64_t> bytes;
    for (const auto& unit : parameters_.units()) bytes.push_back(unit->message_bytes());
    order_.guess(bytes);
  }
  reduces_late_ = can_reduce_late();
  late_.clear();
  finishing_ = false;
  const int64_t held_back = !hidden ? 0 : reduces_late_ ? 1 : units;
  order_.begin(std::max<int64_t>(units - held_back, 0));
}

bool Reductions::can_reduce_late() const {
  if (!comm_.way().queued) return true;
  if (context_.shards_parameters() && comm_.way().gathers == Gathers::collective) return false;
  const bool answers_soon = !knows_order() || learned_hidden_;
  return answers_soon && capture_id(current_stream(context_.compute.device())) == 0;
}

void Reductions::accept(int64_t u, int64_t slot, const at::Tensor& grad, float scale) {
  Unit& unit = parameters_.unit(u);
  // On a device gradients are held until their unit is complete anyway, for one launch.
  const bool needs_bucket =
      in_epoch_ && context_.compute.on_host() && unit.intake().holds_for_message();
  if (needs_bucket && order_.is_near(u, BucketPool::kSize)) reduction_of(u);
  unit.accumulate(slot, grad, scale);
  arrived(u);
}

void Reductions::arrived(int64_t u) {
  if (!in_epoch_) return;
  if (parameters_.unit(u).arrivals().complete()) order_.complete(u);
  start_ready();
}

std::vector<int64_t> Reductions::completed() const {
  // Units may have been added since the last backward. Then the next one says the order.
  if (order_.units() != parameters_.unit_count()) return {};
  return order_.completed();
}

void Reductions::set_order(std::vector<int64_t> order, bool hidden) {
  order_.learn(std::move(order));
  learned_hidden_ = hidden;
}

UnitReduction& Reductions::reduction_of(int64_t u) {
  Unit& unit = parameters_.unit(u);
  for (const auto& reduction : lent_) {
    if (&reduction->unit() == &unit) return *reduction;
  }
  std::unique_ptr<Bucket> bucket = pool_.try_acquire();
  while (bucket == nullptr && !in_flight_.empty()) {
    finish_oldest();
    bucket = pool_.try_acquire();
  }
  TORCH_INTERNAL_ASSERT(bucket != nullptr);
  lent_.push_back(std::make_unique<UnitReduction>(unit, std::move(bucket)));
  lent_.back()->lend_message();
  return *lent_.back();
}

void Reductions::start_ready() {
  while (order_.has_next() && parameters_.unit(order_.next()).arrivals().complete()) start_one();
  after_starts();
}

void Reductions::start_next() {
  order_.end();
  parameters_.unit(order_.next()).arrivals().close();
  start_one();
  after_starts();
}

void Reductions::start_one() {
  start(order_.next(), order_.is_at_last() ? own_late() : std::vector<uint8_t>());
  order_.advance();
}

void Reductions::after_starts() {
  // At once: a rank that throws from now on has sent all that the other ranks wait for, except for
  // later windows.
  all_started_ = order_.all_started();
  // A rank may still throw, and say so in its answer about late gradients.
  if (all_started_ && !reduces_late_) count_users(/*gives_up=*/false);
}

void Reductions::count_users(bool gives_up) {
  if (!counts_users() || users_.started()) return;
  users_.start({.units = reduces_late_ ? own_late() : std::vector<uint8_t>(), .gave_up = gives_up},
               steps_);
}

void Reductions::start(int64_t u, std::vector<uint8_t> late) {
  if (!sums_directly()) start_reduction(u, std::move(late));
  comm_.show_reduction(u, ++started_);
}

void Reductions::start_reduction(int64_t u, std::vector<uint8_t> late) {
  const Range range("reduce", parameters_.unit(u).name());
  UnitReduction& reduction = reduction_of(u);
  name_errors([&] { return reduction.waiting(); },
              [&] { reduction.start(finished_.epoch(), steps_, std::move(late)); });
  if (counts_users()) users_.add(parameters_.unit(u));
  const auto at = std::find_if(lent_.begin(), lent_.end(),
                               [&](const auto& lent) { return lent.get() == &reduction; });
  in_flight_.push_back(std::move(*at));
  lent_.erase(at);
}

void Reductions::finish_oldest() {
  UnitReduction& reduction = *in_flight_.front();
  const Range range("reduce", reduction.unit().name());
  pool_.give_back(reduction.finish(scale_));
  if (!reduction.late().empty()) late_ = reduction.late();
  in_flight_.pop_front();
  // Every rank has sent its part of this one, and is in no earlier backward any more.
  if (!abandoned_.empty()) drop_abandoned();
}

void Reductions::drop_abandoned() {
  // A device may still have to run what they began, before the reduction that this stream has
  // waited for.
  const SideStream::Scope beside(context_.reducing);
  for (AbandonedReduction& reduction : abandoned_) {
    reduction.pending.abandon();
    // They end soon: this rank has waited for a later reduction.
    if (reduction.copied.has_value()) reduction.copied->synchronize();
    if (reduction.bucket != nullptr) reduction.bucket->mark_used();
  }
  abandoned_.clear();
}

void Reductions::start_all() {
  for (const auto& unit : parameters_.units()) unit->arrivals().close();
  order_.end();
  start_ready();
}

void Reductions::complete_for_others() {
  if (finishing_) return;
  if (!order_.all_started()) start_all();
  count_users(/*gives_up=*/true);
  // Later windows, too. Offloaded sums are added by the host, which would wait for the others.
  while (!in_flight_.empty() && !context_.offloads()) finish_oldest();
}

void Reductions::finish() {
  start_all();
  finishing_ = true;  // what throws from here on has waited
  count_users(/*gives_up=*/false);
  finish_started();
  if (reduces_late_ && any_late()) reduce_late();
  if (announced_) {
    notices_.finish(finished_.epoch(), [this] {
      return where(context_.global_rank) + "waited for the other ranks' notices of backward " +
             std::to_string(finished_.epoch());
    });
  }
  context_.reducing.join();
  // All messages of that rank arrived, but it will not add up those of the others.
  const int64_t gone = comm_.who_abandoned(Comm::Kind::reduction, finished_.epoch());
  TORCH_CHECK(gone < 0, where(context_.global_rank), "backward ", finished_.epoch(), ": ",
              comm_.given_up_by(gone, "Repeat the backward on every rank."));
  pool_.discard();
}

void Reductions::finish_started() {
  while (!in_flight_.empty()) finish_oldest();
  if (!users_.started()) return;
  SlotUsers::Late late = users_.finish(finished_.epoch());
  late_ = std::move(late.units);
  TORCH_CHECK(!any_late() || !late.gave_up, where(context_.global_rank),
              "a rank threw in backward ", finished_.epoch(),
              ", and the late gradients of inner backwards were not reduced."
              " Repeat the backward on every rank.");
}

std::vector<uint8_t> Reductions::own_late() const {
  std::vector<uint8_t> late;
  for (const auto& unit : parameters_.units()) late.push_back(unit->arrivals().late() ? 1 : 0);
  return late;
}

bool Reductions::any_late() const {
  return std::any_of(late_.begin(), late_.end(), [](uint8_t late) { return late != 0; });
}

void Reductions::reduce_late() {
  const std::vector<uint8_t> late = std::move(late_);
  users_.clear();
  all_started_ = false;
  for (const int64_t u : order_.order()) {
    if (late[u] == 0) continue;
    parameters_.unit(u).arrivals().reopen_for_late_gradients();
    start(u, {});
  }
  count_users(/*gives_up=*/false);
  all_started_ = true;
  finish_started();
}

bool Reductions::sent_all() const {
  return all_started_ && std::all_of(in_flight_.begin(), in_flight_.end(),
                                     [](const auto& reduction) { return reduction->sent_all(); });
}

void Reductions::abort(int64_t units) {
  if (std::exchange(in_epoch_, false)) {
    if (comm_.way().queued) finished_.note_lost(finished_.epoch());
    const auto exit = sent_all() ? Comm::Exit::sent_all : Comm::Exit::early;
    comm_.leave_epoch(Comm::Kind::reduction, finished_.epoch(), exit);
  }
  context_.reducing.join();
  for (int64_t u = 0; u < units; ++u) parameters_.unit(u).abort_backward();
  for (auto& reduction : lent_) in_flight_.push_back(std::move(reduction));
  lent_.clear();
  for (const auto& reduction : in_flight_) {
    AbandonedReduction abandoned = reduction->abandon();
    if (reduction->started()) {
      abandoned_.push_back(std::move(abandoned));
      pool_.forget();
    } else {
      pool_.give_back(std::move(abandoned.bucket));
    }
  }
  in_flight_.clear();
  if (users_.started()) abandoned_.push_back(users_.abandon());
}

}  // namespace zero_ext
