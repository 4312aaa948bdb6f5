#include "comm/local/shared_host_transport.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "comm/local/linux_calls.h"
#include "core/interrupts.h"
#include "core/range.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zero_ext {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A waiting rank checks this often whether its peer's process has ended, and for interrupts.
constexpr milliseconds kSlice = kInterruptSlice;
// About 50 µs: as long as waking a sleeper takes.
constexpr int kSpins = 1000;

constexpr int64_t kIntroduction = sizeof(Introduction) / sizeof(int64_t);

Nonce random_nonce() {
  std::random_device random;
  Nonce nonce;
  for (int64_t& part : nonce) part = static_cast<int64_t>(uint64_t{random()} << 32 | random());
  return nonce;
}

Introduction introduction_of(const at::Tensor& introductions, int64_t peer) {
  Introduction introduction;
  std::memcpy(&introduction, introductions.const_data_ptr<int64_t>() + peer * kIntroduction,
              sizeof(introduction));
  return introduction;
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

class SharedHostTransport::MessageWork final : public c10d::Work {
 public:
  MessageWork(std::shared_ptr<SharedHostTransport> owner, std::shared_ptr<Transfer> transfer)
      : owner_(std::move(owner)), transfer_(std::move(transfer)) {}
  ~MessageWork() override { owner_->cancel(transfer_); }
  bool wait(milliseconds timeout) override {
    owner_->wait(transfer_, timeout == kNoTimeout ? owner_->timeout_ : timeout, {});
    return true;
  }
  void wait(const Meanwhile& meanwhile) { owner_->wait(transfer_, owner_->timeout_, meanwhile); }
  void withdraw() { owner_->withdraw(transfer_); }

 private:
  std::shared_ptr<SharedHostTransport> owner_;
  std::shared_ptr<Transfer> transfer_;
};

// All of the process that can be reached. Never destroyed: threads may outlive main().
struct SharedHostTransport::Living {
  static Living& get() {
    static auto* living = new Living;
    return *living;
  }

  std::mutex mutex;
  std::set<SharedHostTransport*> all;
};

// Connecting

std::shared_ptr<SharedHostTransport> SharedHostTransport::connect(int64_t rank, int64_t world,
                                                                  milliseconds timeout,
                                                                  int64_t host,
                                                                  const AllGather& all_gather) {
  std::shared_ptr<SharedHostTransport> made(new SharedHostTransport(rank, world, timeout));
  made->connect(host, all_gather);
  return made;
}

SharedHostTransport::SharedHostTransport(int64_t rank, int64_t world, milliseconds timeout)
    : rank_(rank), timeout_(timeout), nonce_(random_nonce()), peers_(world) {}

SharedHostTransport::~SharedHostTransport() {
  {
    Living& living = Living::get();
    const std::lock_guard lock(living.mutex);
    living.all.erase(this);
  }
  if (!mailbox_.is_open() || getpid() != process_) return;  // a forked child shares the mailbox
  close();
}

void SharedHostTransport::connect(int64_t host, const AllGather& all_gather) {
  const auto world = static_cast<int64_t>(peers_.size());
  if (host != 0) mailbox_ = Mailbox::create(world);
  const Introduction own{.host = mailbox_.is_open() ? host : 0,
                         .system_and_user = linux_calls::system_and_user(),
                         .process = process_,
                         .descriptor = mailbox_.descriptor(),
                         .nonce_address = reinterpret_cast<intptr_t>(&nonce_),
                         .nonce = nonce_};
  const at::Tensor introduction = at::empty({kIntroduction}, at::TensorOptions().dtype(at::kLong));
  std::memcpy(introduction.mutable_data_ptr(), &own, sizeof(own));
  const at::Tensor introductions = all_gather(introduction);
  if (has_candidates(introductions)) reads_.emplace();
  // All allow reads before any opens a peer. When all have sent their row of the matrix, all have
  // opened this rank's mailbox.
  all_gather(introduction);
  const at::Tensor matrix = all_gather(open_peers(introductions));
  mailbox_.drop_descriptor();
  const auto* opened = matrix.const_data_ptr<int64_t>();
  const auto reach_each_other = [&](int64_t a, int64_t b) {
    return opened[a * world + b] != 0 && opened[b * world + a] != 0;
  };
  for (int64_t a = 0; a < world; ++a)
    peers_[a].set_reached(a != rank_ && reach_each_other(rank_, a));
  find_hosts(reach_each_other);
  if (!reaches_any()) return reads_.reset();
  Living& living = Living::get();
  const std::lock_guard lock(living.mutex);
  living.all.insert(this);
}

void SharedHostTransport::find_hosts(
    const std::function<bool(int64_t, int64_t)>& reach_each_other) {
  const int64_t world = std::ssize(peers_);
  for (int64_t a = 0; a < world; ++a) {
    int64_t first = 0;
    while (first < a && !reach_each_other(first, a)) ++first;
    hosts_.push_back(first);
  }
  bool agree = true;
  for (int64_t a = 0; a < world; ++a) {
    for (int64_t b = 0; b < a; ++b)
      agree = agree && reach_each_other(a, b) == (hosts_[a] == hosts_[b]);
  }
  if (!agree) std::iota(hosts_.begin(), hosts_.end(), 0);
  reaches_all_ = std::all_of(hosts_.begin(), hosts_.end(), [](int64_t host) { return host == 0; });
}

bool SharedHostTransport::reaches_any() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const LocalPeer& peer) { return peer.reached(); });
}

bool SharedHostTransport::has_candidates(const at::Tensor& introductions) const {
  const auto of = [&](int64_t peer) { return introduction_of(introductions, peer); };
  if (of(rank_).host == 0) return false;
  for (int64_t peer = 0; peer < std::ssize(peers_); ++peer) {
    const Introduction other = of(peer);
    if (peer != rank_ && other.host == of(rank_).host &&
        other.system_and_user == of(rank_).system_and_user) {
      return true;
    }
  }
  return false;
}

at::Tensor SharedHostTransport::open_peers(const at::Tensor& introductions) {
  const auto world = static_cast<int64_t>(peers_.size());
  const at::Tensor row = at::empty({world}, introductions.options());
  auto* opened = row.mutable_data_ptr<int64_t>();
  const int64_t own_host = introduction_of(introductions, rank_).host;
  for (int64_t peer = 0; peer < world; ++peer) {
    const Introduction other = introduction_of(introductions, peer);
    const bool open = peer != rank_ && mailbox_.is_open() && other.host == own_host &&
                      peers_[peer].open(other, rank_, world);
    opened[peer] = open ? 1 : 0;
  }
  return row;
}

// Messages

Message SharedHostTransport::work_of(std::shared_ptr<Transfer> transfer) {
  return c10::make_intrusive<MessageWork>(shared_from_this(), std::move(transfer));
}

Message SharedHostTransport::send(const at::Tensor& tensor, int64_t to, const MessageLabel& label) {
  auto transfer = std::make_shared<Transfer>(
      Transfer{.tensor = tensor, .peer = to, .label = label, .sending = true});
  {
    const std::lock_guard lock(mutex_);
    const uint64_t number = sent_count_++;
    sending_.emplace(number, transfer);
    peers_[to].write(transfer->record(Record::sent, number));
    progress();
  }
  return work_of(std::move(transfer));
}

Message SharedHostTransport::receive(const at::Tensor& into, int64_t from,
                                     const MessageLabel& label, int64_t offset) {
  auto transfer = std::make_shared<Transfer>(
      Transfer{.tensor = into, .peer = from, .label = label, .offset = offset});
  {
    const std::lock_guard lock(mutex_);
    receiving_.push_back(transfer);
    ++receiving_count_;
    progress();
  }
  return work_of(std::move(transfer));
}

Message SharedHostTransport::post(const at::Tensor& tensor, int64_t to, const MessageLabel& label) {
  auto transfer = std::make_shared<Transfer>(
      Transfer{.tensor = tensor, .peer = to, .label = label, .done = true});
  {
    const std::lock_guard lock(mutex_);
    peers_[to].write(transfer->record(Record::posted, /*number=*/0));
    progress();
  }
  return work_of(std::move(transfer));
}

void SharedHostTransport::cancel(const std::shared_ptr<Transfer>& transfer) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find(receiving_.begin(), receiving_.end(), transfer);
  if (found == receiving_.end()) return;
  receiving_.erase(found);
  --receiving_count_;
}

void SharedHostTransport::withdraw(const std::shared_ptr<Transfer>& transfer) {
  const std::lock_guard lock(mutex_);
  const auto sent = std::find_if(sending_.begin(), sending_.end(),
                                 [&](const auto& each) { return each.second == transfer; });
  if (sent == sending_.end()) return;
  peers_[transfer->peer].write(transfer->record(Record::withdrawn, sent->first));
  sending_.erase(sent);
}

void SharedHostTransport::withdraw(c10d::Work& message) {
  if (auto* ours = dynamic_cast<MessageWork*>(&message)) ours->withdraw();
}

// Waiting

bool SharedHostTransport::wait(c10d::Work& message, const Meanwhile& meanwhile) {
  auto* ours = dynamic_cast<MessageWork*>(&message);
  if (ours != nullptr) ours->wait(meanwhile);
  return ours != nullptr;
}

bool SharedHostTransport::has_ended(const Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  progress();
  TORCH_CHECK(transfer.error.empty(), transfer.error);
  return transfer.done;
}

void SharedHostTransport::wait(const std::shared_ptr<Transfer>& transfer, milliseconds timeout,
                               const Meanwhile& meanwhile) {
  const MessageLabel& label = transfer->label;
  const LocalPeer& peer = peers_[transfer->peer];
  const bool sending = transfer->sending;
  const bool in_epoch = label.epoch != kNoEpoch;
  Doorbell& doorbell = mailbox_.board().doorbell;
  Clock::time_point begin = Clock::now();
  Clock::time_point checked = begin;
  int spins = kSpins;
  std::string end;
  for (;;) {
    const uint32_t seen = doorbell.rings();
    if (has_ended(*transfer)) return;
    TORCH_CHECK(end.empty(), end);
    if (meanwhile && meanwhile()) {
      begin = Clock::now();
      continue;
    }
    while (spins > 0 && doorbell.rings() == seen) {
      pause();
      --spins;
    }
    if (spins > 0) continue;
    doorbell.sleep(seen, kSlice);
    const SharedEpochs& epochs = peer.board().epochs;
    if (in_epoch && sending && epochs.drops(label)) return withdraw(transfer);
    // These ends are raised after one more look at what the peer sent before.
    if (in_epoch && !sending && epochs.is_past(label.kind, label.epoch))
      end = "after an error on some rank it went on without this.";
    const Clock::time_point now = Clock::now();
    if (now - checked < kSlice || !end.empty()) continue;
    checked = now;
    try {
      check_interrupt();
    } catch (...) {  // ranks that have not begun this epoch meet this one in the next
      if (in_epoch) leave_epoch(label.kind, label.epoch, EpochExit::abandoned);
      throw;
    }
    // A rank that has left sends shutdown handshakes only. A peer reads them after it has left, too.
    end = sending && has_left_ ? peer.end() : peer.end_of_messages();
    if (!end.empty() || now - begin < timeout) continue;
    // This process may have been stopped meanwhile: what has arrived counts.
    if (has_ended(*transfer)) return;
    if (in_epoch) leave_epoch(label.kind, label.epoch, EpochExit::abandoned);
    TORCH_CHECK(false, "timed out after ", timeout.count(), " ms; it is in ",
                call_of(transfer->peer), ".", missing_beside(*transfer));
  }
}

std::string SharedHostTransport::missing_beside(const Transfer& transfer) {
  std::string text;
  const std::lock_guard lock(mutex_);
  for (const auto& other : receiving_) {
    if (other->tag() != transfer.tag() || other->peer == transfer.peer) continue;
    const int64_t rank = global_ranks_.empty() ? other->peer : global_ranks_[other->peer];
    const bool died = peers_[other->peer].has_died();
    text += c10::str(" Rank ", rank, " has not come either; ",
                     died ? "its process has ended" : "it is in " + call_of(other->peer), ".");
  }
  return text;
}

// Progress

void SharedHostTransport::make_progress_in_parent() {
  if (getpid() != process_) return;  // a forked child shares the mailbox
  const std::lock_guard lock(mutex_);
  progress();
}

void SharedHostTransport::progress() {
  bool all_written = true;
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (!peers_[r].reached()) continue;
    all_written = peers_[r].flush() && all_written;
    read_ring(static_cast<int64_t>(r));
  }
  if (all_written) {
    for (int kind = 0; kind < kMessageKinds; ++kind) {
      mailbox_.board().epochs.show_past(static_cast<MessageKind>(kind), past_[kind]);
    }
    if (std::exchange(leaving_, false)) {
      mailbox_.board().left.store(1);
      ring_all();
    }
  }
  for (auto at = receiving_.begin(); at != receiving_.end();) {
    const bool ended = try_receive(**at);
    at = ended ? receiving_.erase(at) : std::next(at);
    if (ended) --receiving_count_;
  }
}

void SharedHostTransport::read_ring(int64_t rank) {
  Record record;
  while (mailbox_.from(rank).try_read(&record)) {
    if (record.kind == Record::withdrawn) {
      peers_[rank].inbox().drop(record.tag, record.number);
      continue;
    }
    if (record.kind != Record::taken) {
      peers_[rank].inbox().add(record);
      continue;
    }
    const auto sent = sending_.find(record.number);
    if (sent == sending_.end()) continue;
    sent->second->done = true;
    sent->second->tensor.reset();
    sending_.erase(sent);
  }
}

int64_t SharedHostTransport::announced(int64_t peer) {
  const std::lock_guard lock(mutex_);
  progress();
  return peers_[peer].inbox().count();
}

bool SharedHostTransport::try_receive(Transfer& transfer) {
  LocalPeer& peer = peers_[transfer.peer];
  const std::optional<Record> message = peer.inbox().take(transfer.tag());
  if (!message.has_value()) return false;
  const size_t bytes = transfer.tensor.nbytes();
  const bool whole = transfer.offset == Transfer::kWhole;
  const size_t begin = whole ? 0 : static_cast<size_t>(transfer.offset);
  if (whole ? message->bytes != bytes : message->bytes < begin + bytes) {
    transfer.error = c10::str("it sent ", message->bytes, " bytes where this rank expects ",
                              begin + bytes, ", as if it were in another call.");
  } else if (bytes > 0) {
    Record part = *message;
    part.address += begin;
    part.bytes = bytes;
    const Range range("copy", [&] { return "from peer " + std::to_string(transfer.peer); });
    transfer.error = peer.read(part, transfer.tensor.mutable_data_ptr());
  }
  transfer.done = transfer.error.empty();
  transfer.tensor.reset();
  if (message->kind == Record::posted) {
    peer.board().served.fetch_add(1, std::memory_order_relaxed);
  } else {
    peer.write({.kind = Record::taken, .number = message->number});
  }
  return true;
}

void SharedHostTransport::ring_all() const {
  for (const LocalPeer& peer : peers_) peer.ring();
}

// Calls

void SharedHostTransport::show_call(const std::string& name) {
  Living& living = Living::get();
  const std::lock_guard lock(living.mutex);
  for (SharedHostTransport* transport : living.all) {
    if (transport->process_ == getpid()) transport->mailbox_.board().call.write(name);
  }
}

void SharedHostTransport::for_each_peer(
    const std::function<void(int64_t, const LocalPeer&)>& visit) {
  Living& living = Living::get();
  const std::lock_guard lock(living.mutex);
  for (const SharedHostTransport* transport : living.all) {
    const auto& ranks = transport->global_ranks_;
    for (int64_t peer = 0; peer < std::ssize(transport->peers_); ++peer) {
      if (transport->reaches(peer))
        visit(ranks.empty() ? peer : ranks[peer], transport->peers_[peer]);
    }
  }
}

}  // namespace zero_ext
