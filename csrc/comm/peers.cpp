#include "comm/peers.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "comm/local/shared_host_transport.h"
#include "comm/stalled_ranks.h"
#include "core/errors.h"
#include "device/streams.h"

namespace zero_ext {
namespace {

// After an error of one rank, the others raise theirs within this time.
constexpr std::chrono::seconds kSoon{1};

}  // namespace

Peers::Peers(std::shared_ptr<const ProcessGroups> groups, std::vector<int64_t> global_ranks)
    : groups_(std::move(groups)),
      rank_(groups_->rank()),
      global_ranks_(std::move(global_ranks)),
      hosts_(groups_->world()) {
  std::iota(hosts_.begin(), hosts_.end(), 0);
  find_routes();
}

Peers::Peers(const Peers& all, std::vector<int64_t> subset) : Peers(all) {
  global_ranks_.clear();
  for (const int64_t place : subset) global_ranks_.push_back(all.global_rank(place));
  rank_ = std::find(subset.begin(), subset.end(), all.rank()) - subset.begin();
  subset_ = std::move(subset);
  find_routes();
}

Peers::Peers(const Peers& other) = default;
Peers::~Peers() = default;

void Peers::check_process() const {
  TORCH_CHECK(world() == 1 || !is_forked(), where(global_rank()),
              "a forked child cannot exchange messages in its parent's place. Have a DataLoader's"
              " workers do without this model, or give them a plain copy of it with its full"
              " parameters.");
}

void Peers::watch_collectives(std::chrono::milliseconds timeout) {
  if (world() == 1 || !way().queued) return;
  auto ranks = std::make_unique<StalledRanks>(
      groups_->store(), rank(), world(),
      [ranks = global_ranks_](int64_t r) { return ranks.empty() ? r : ranks[r]; });
  watch_ = std::make_shared<CollectiveWatch>(groups_->device(), global_rank(), timeout,
                                             std::move(ranks));
}

void Peers::compare_gathers() {
  if (!way().one_host || shards() == 1) return;
  const GatherOrder::Ranks ranks{.own = rank(),
                                 .first = rank() - rank() % shards(),
                                 .count = shards(),
                                 .global = global_ranks_};
  gather_order_ = std::make_shared<GatherOrder>(local_transport_, ranks);
  watch_->compare_gathers(gather_order_);
}

void Peers::join_watch_of(const Peers& all) {
  watch_ = all.watch_;
  gather_order_ = all.gather_order_;
}

// Ranks of the same host

void Peers::connect_local(std::chrono::milliseconds timeout, int64_t host,
                          const AllGather& all_gather) {
  auto transport = SharedHostTransport::connect(rank(), world(), timeout, host, all_gather);
  hosts_ = transport->hosts();
  find_routes();
  only_local_peers_ = transport->reaches_all();
  if (!transport->reaches_any()) return;
  local_transport_ = std::move(transport);
  local_transport_->set_global_ranks(global_ranks_);
}

void Peers::find_routes() {
  std::vector<int64_t> hosts;
  const int64_t first = rank() - rank() % shards();
  for (int64_t r = first; r < first + shards(); ++r) hosts.push_back(hosts_[place(r)]);
  routes_ = HostRoutes(std::move(hosts));
}

void Peers::leave_local() {
  if (local_transport_ != nullptr) local_transport_->leave();
}

void Peers::show_gather(int64_t unit) const {
  check_process();
  if (gather_order_ != nullptr && capture_id(current_stream(groups_->device())) == 0)
    gather_order_->enter(unit);
  note_collective(gathered_, unit);
}

void Peers::show_reduction(int64_t unit, int64_t started) const {
  if (gather_order_ != nullptr) gather_order_->show_reductions(started);
  note_collective(reduced_, unit);
}

void Peers::note_collective(size_t& hash, int64_t unit) const {
  if (way().begun != Begun::unknown) return;
  if (capture_id(current_stream(groups_->device())) != 0) return;
  hash = c10::hash_combine(hash, c10::get_hash(unit + 1));
}

bool Peers::reads(int64_t peer) const {
  return local_transport_ != nullptr && local_transport_->reaches(place(peer));
}

int64_t Peers::local_peers() const {
  int64_t count = 0;
  for (int64_t peer = 0; peer < world() && !way().queued; ++peer) {
    if (reads(peer)) ++count;
  }
  return count;
}

void Peers::make_progress() {
  if (local_transport_ != nullptr) local_transport_->make_progress();
}

uint64_t Peers::served() const {
  return local_transport_ == nullptr ? 0 : local_transport_->served();
}

void Peers::close() const {
  if (local_transport_ != nullptr) local_transport_->close();
}

int64_t Peers::next_epoch(MessageKind kind, int64_t last) const {
  SharedHostTransport* transport = own_transport();
  return transport == nullptr ? last + 1 : transport->next_epoch(kind, last);
}

void Peers::leave_epoch(MessageKind kind, int64_t epoch, EpochExit exit) const noexcept {
  if (SharedHostTransport* transport = own_transport()) transport->leave_epoch(kind, epoch, exit);
}

int64_t Peers::who_abandoned(MessageKind kind, int64_t epoch) const {
  SharedHostTransport* transport = own_transport();
  return transport == nullptr ? -1 : transport->who_abandoned(kind, epoch);
}

std::string Peers::given_up_by(int64_t rank, const std::string& remedy) const {
  const std::string dead = SharedHostTransport::dead_peers();
  return "rank " + std::to_string(global_rank(rank)) + " has given up waiting for this rank." +
         (dead.empty() ? " " + remedy : dead + " Start all ranks again.");
}

int64_t Peers::who_began(MessageKind kind, int64_t epoch) const {
  SharedHostTransport* transport = own_transport();
  return transport == nullptr ? -1 : transport->who_began(kind, epoch);
}

bool Peers::is_past(MessageKind kind, int64_t epoch) const {
  SharedHostTransport* transport = own_transport();
  return transport != nullptr && transport->is_past(kind, epoch);
}

// Messages

void Peers::add(Pending& pending, Pending::Part part) const {
  const bool on_host = part.tensor.is_cpu();
  if (part.peer != Pending::kAllRanks) {
    part.peer = global_rank(part.peer);
  } else if (on_host) {
    part.awaited = [this] { return awaited(); };
  }
  pending.add(std::move(part), on_host ? nullptr : watch_, waited_);
}

std::string Peers::awaited() const {
  std::vector<int64_t> places;
  for (int64_t r = 0; r < world(); ++r) places.push_back(place(r));
  std::vector<int64_t> missing = groups_->missing_at("waited_in_vain", places, kSoon);
  for (int64_t& r : missing) r = global_rank(std::ranges::find(places, r) - places.begin());
  return missing.empty() ? "the other ranks" : "rank " + list_of_ranks(missing);
}

Message Peers::start_send(const at::Tensor& tensor, int64_t to, const MessageLabel& label) {
  check_process();
  const int64_t place = this->place(to);
  return reads(to) ? local_transport_->send(tensor, place, label)
                   : groups_->send(tensor, place, label);
}

Message Peers::post_persistent(const at::Tensor& tensor, int64_t to, const MessageLabel& label) {
  check_process();
  return local_transport_->post(tensor, place(to), label);
}

void Peers::send(const at::Tensor& tensor, int64_t to, const MessageLabel& label,
                 Pending& pending) {
  const at::Tensor out = outgoing(tensor);
  add(pending, {.message = start_send(out, to, label), .tensor = out, .peer = to, .sending = true});
}

void Peers::receive(const at::Tensor& into, int64_t from, const MessageLabel& label,
                    Pending& pending, Pending::Relay relay) {
  check_process();
  const at::Tensor here = incoming(into);
  const int64_t place = this->place(from);
  Message message = reads(from) ? local_transport_->receive(here, place, label)
                                : groups_->receive(here, place, label);
  add(pending, {.message = std::move(message),
                .tensor = here,
                .peer = from,
                .target = target_of(into),
                .relay = std::move(relay)});
}

void Peers::receive_part(const at::Tensor& into, int64_t from, const MessageLabel& label,
                         int64_t offset, Pending& pending) {
  check_process();
  const at::Tensor here = incoming(into);
  add(pending, {.message = local_transport_->receive(here, place(from), label, offset),
                .tensor = here,
                .peer = from,
                .target = target_of(into)});
}

at::Tensor Peers::outgoing(const at::Tensor& tensor) const {
  return is_staged(tensor) ? tensor.cpu() : tensor;
}

at::Tensor Peers::incoming(const at::Tensor& tensor) const {
  return is_staged(tensor) ? at::empty_like(tensor, at::kCPU) : tensor;
}

at::Tensor Peers::target_of(const at::Tensor& tensor) const {
  return is_staged(tensor) ? tensor : at::Tensor();
}

}  // namespace zero_ext
