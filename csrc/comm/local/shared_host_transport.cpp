#include "comm/local/shared_host_transport.h"

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#if defined(__linux__)

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <deque>
#include <fstream>
#include <list>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zero_ext {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A waiting rank looks for a dead peer this often.
constexpr milliseconds kSlice{20};
// About 50 µs: as long as waking a sleeper takes.
constexpr int kSpins = 1000;
constexpr uint64_t kRingRecords = 4096;
constexpr size_t kCacheLine = 64;

// What one rank tells another.
struct Record {
  enum Kind : uint64_t { offered, taken, posted };
  uint64_t kind;
  uint64_t number;  // of the message, counted by its sender
  uint64_t tag;
  uint64_t address;  // in the sender
  uint64_t bytes;
};

// One writer, one reader, in two processes.
struct Ring {
  alignas(kCacheLine) std::atomic<uint64_t> written;
  alignas(kCacheLine) std::atomic<uint64_t> read;
  alignas(kCacheLine) Record records[kRingRecords];

  bool try_write(const Record& record) {
    const uint64_t at = written.load(std::memory_order_relaxed);
    if (at - read.load(std::memory_order_acquire) == kRingRecords) return false;
    records[at % kRingRecords] = record;
    written.store(at + 1, std::memory_order_release);
    return true;
  }
  bool try_read(Record* record) {
    const uint64_t at = read.load(std::memory_order_relaxed);
    if (at == written.load(std::memory_order_acquire)) return false;
    *record = records[at % kRingRecords];
    read.store(at + 1, std::memory_order_release);
    return true;
  }
};

struct Doorbell {
  alignas(kCacheLine) std::atomic<uint32_t> rings;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> left;    // its owner sends nothing any more
  std::atomic<uint32_t> closed;  // its owner's messages may not be read any more
  std::atomic<uint64_t> served;  // what its owner has posted was read so often
  // Of each kind, see Note [Epochs]: the first epoch that its owner is not past, the one after the
  // last that it has abandoned, and the one after the last that it takes no messages of.
  using Rounds = std::array<std::atomic<int64_t>, SharedHostTransport::kKinds>;
  alignas(kCacheLine) Rounds rounds;
  Rounds abandoned_epochs;
  Rounds dropped_epochs;

  void ring() {
    rings.fetch_add(1);
    if (sleepers.load() == 0) return;
    syscall(SYS_futex, &rings, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
  // Until the next ring after `seen` was read, at most `timeout`.
  void sleep(uint32_t seen, milliseconds timeout) {
    const timespec limit{.tv_sec = timeout.count() / 1000,
                         .tv_nsec = timeout.count() % 1000 * 1'000'000};
    sleepers.fetch_add(1);
    syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &limit, nullptr, 0);
    sleepers.fetch_sub(1);
  }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// A mapping of a rank's mailbox: its doorbell, then a ring for each rank that writes to it. Fresh
// shared memory is zero, and so is an empty ring.
class Mailbox {
 public:
  Mailbox() = default;
  Mailbox(int file, int64_t world) : bytes_(size(world)) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) memory_ = memory;
  }
  Mailbox(Mailbox&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}
  Mailbox& operator=(Mailbox&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mailbox() {
    if (memory_ != nullptr) munmap(memory_, bytes_);
  }

  static size_t size(int64_t world) { return sizeof(Doorbell) + world * sizeof(Ring); }
  bool open() const { return memory_ != nullptr; }
  Doorbell& doorbell() const { return *static_cast<Doorbell*>(memory_); }
  Ring& from(int64_t rank) const {
    return reinterpret_cast<Ring*>(static_cast<char*>(memory_) + sizeof(Doorbell))[rank];
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

class File {
 public:
  explicit File(int number) : number_(number) {}
  ~File() {
    if (number_ >= 0) close(number_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

// 0, or an errno.
int read_memory_of(pid_t process, uint64_t address, void* into, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const iovec here{.iov_base = static_cast<char*>(into) + done, .iov_len = bytes - done};
    const iovec there{.iov_base = reinterpret_cast<void*>(address + done), .iov_len = bytes - done};
    const ssize_t count = process_vm_readv(process, &here, 1, &there, 1, 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? errno : EFAULT;
    done += count;
  }
  return 0;
}

// Yama lets only ancestors look into a process, unless it says who else may: then that one and its
// descendants. The other ranks' launcher is this one's.
void allow_processes_of_the_launcher() {
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope == 1) prctl(PR_SET_PTRACER, getppid(), 0, 0, 0);
}

using Nonce = std::array<int64_t, 2>;

Nonce random_nonce() {
  std::random_device random;
  Nonce nonce;
  for (int64_t& part : nonce) part = static_cast<int64_t>(uint64_t{random()} << 32 | random());
  return nonce;
}

struct Transfer {
  at::Tensor tensor;
  int64_t peer;
  SharedHostTransport::Label label;
  bool sending = false;
  bool done = false;
  std::string error{};

  // Among the messages of all kinds.
  uint64_t tag() const {
    return SharedHostTransport::kKinds * static_cast<uint64_t>(label.tag) +
           static_cast<uint64_t>(label.kind);
  }
};

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

class LinuxSharedHostTransport final
    : public SharedHostTransport,
      public std::enable_shared_from_this<LinuxSharedHostTransport> {
 public:
  LinuxSharedHostTransport(int64_t rank, int64_t world, milliseconds timeout)
      : rank_(rank), timeout_(timeout), peers_(world) {}
  ~LinuxSharedHostTransport() override;
  LinuxSharedHostTransport(const LinuxSharedHostTransport&) = delete;
  LinuxSharedHostTransport& operator=(const LinuxSharedHostTransport&) = delete;

  bool connect(bool allowed, const std::function<at::Tensor(const at::Tensor&)>& all_gather);

  bool reaches(int64_t peer) const override { return peers_[peer].reached; }
  bool reaches_all() const override { return reaches_all_; }
  Message send(const at::Tensor& tensor, int64_t to, const Label& label) override;
  Message receive(const at::Tensor& into, int64_t from, const Label& label) override;
  Message post(const at::Tensor& tensor, int64_t to, const Label& label) override;
  int64_t next_epoch(Kind kind, int64_t last) override;
  void leave_epoch(Kind kind, int64_t epoch, Exit exit) override;
  int64_t who_abandoned(Kind kind, int64_t epoch) const override;
  void leave() override {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
    has_left_ = true;
    progress();
  }
  void close() override {
    mailbox_.doorbell().closed.store(1);
    ring_all();
  }
  uint64_t served() const override { return mailbox_.doorbell().served.load(); }
  void make_progress() override {
    if (receiving_count_.load(std::memory_order_relaxed) == 0) return;
    if (getpid() != process_) return;  // a forked child shares the mailbox
    const std::lock_guard lock(mutex_);
    progress();
  }

  void wait(const std::shared_ptr<Transfer>& transfer, milliseconds timeout);
  void cancel(const std::shared_ptr<Transfer>& transfer);
  void withdraw(const std::shared_ptr<Transfer>& transfer);

 private:
  struct Peer {
    bool reached = false;
    pid_t process = 0;
    uint64_t nonce_address = 0;
    Nonce nonce{};
    Mailbox mailbox;
    std::deque<Record> unwritten;                              // its ring was full
    std::unordered_map<uint64_t, std::deque<Record>> offered;  // by tag
    std::unordered_map<uint64_t, Record> posted;               // by tag
  };

  static bool is_alive(const Peer& peer) {
    Nonce read{};
    return read_memory_of(peer.process, peer.nonce_address, &read, sizeof(read)) == 0 &&
           read == peer.nonce;
  }
  // Why nothing of `peer` can be read any more; empty where it can.
  static std::string end_of(const Peer& peer) {
    if (peer.mailbox.doorbell().closed.load() != 0) return "it has deleted its model.";
    return is_alive(peer) ? "" : "its process has ended.";
  }
  // Why nothing more comes from `peer`; empty where something may.
  static std::string end_of_messages(const Peer& peer) {
    const std::string end = end_of(peer);
    const bool left = end.empty() && peer.mailbox.doorbell().left.load() != 0;
    return left ? "its script has ended, or it has deleted its model." : end;
  }
  // The sender of what is waited for is past its epoch.
  bool is_past(const Transfer& transfer) const {
    return !transfer.sending && is_before(transfer, &Doorbell::rounds);
  }
  // The receiver of what was sent takes nothing of its epoch any more.
  bool is_dropped(const Transfer& transfer) const {
    return transfer.sending && is_before(transfer, &Doorbell::dropped_epochs);
  }
  bool is_before(const Transfer& transfer, Doorbell::Rounds Doorbell::* rounds) const {
    if (transfer.label.epoch == kNoEpoch) return false;
    const Doorbell& doorbell = peers_[transfer.peer].mailbox.doorbell();
    return transfer.label.epoch < (doorbell.*rounds)[index_of(transfer.label.kind)].load();
  }
  static size_t index_of(Kind kind) { return static_cast<size_t>(kind); }
  // This rank is past the epochs before `first`.
  void show_epochs(Kind kind, int64_t first);
  void ring_all() const {
    for (const Peer& peer : peers_) {
      if (peer.mailbox.open()) peer.mailbox.doorbell().ring();
    }
  }
  void write(Peer& peer, const Record& record);
  void progress();
  void read_ring(int64_t peer);
  bool try_receive(Transfer& transfer);
  static void read(const Peer& peer, const Record& message, Transfer& transfer);

  int64_t rank_;
  milliseconds timeout_;
  pid_t process_ = getpid();
  Nonce nonce_ = random_nonce();
  Mailbox mailbox_;
  std::vector<Peer> peers_;
  bool reaches_all_ = true;

  std::mutex mutex_;  // for what follows, and what changes in peers_
  uint64_t sent_ = 0;
  bool leaving_ = false;  // nobody has been told yet
  bool has_left_ = false;
  std::array<int64_t, kKinds> epochs_{};  // what is to be shown behind all that was sent
  std::unordered_map<uint64_t, std::shared_ptr<Transfer>> sending_;  // by number
  std::list<std::shared_ptr<Transfer>> receiving_;                   // in the order of the calls
  std::atomic<int64_t> receiving_count_{0};
};

class MessageWork final : public c10d::Work {
 public:
  MessageWork(std::shared_ptr<LinuxSharedHostTransport> owner, std::shared_ptr<Transfer> transfer)
      : owner_(std::move(owner)), transfer_(std::move(transfer)) {}
  ~MessageWork() override { owner_->cancel(transfer_); }
  bool wait(milliseconds timeout) override {
    owner_->wait(transfer_, timeout);
    return true;
  }
  void withdraw() { owner_->withdraw(transfer_); }

 private:
  std::shared_ptr<LinuxSharedHostTransport> owner_;
  std::shared_ptr<Transfer> transfer_;
};

LinuxSharedHostTransport::~LinuxSharedHostTransport() {
  if (!mailbox_.open() || getpid() != process_) return;  // a forked child shares the mailbox
  close();
}

bool LinuxSharedHostTransport::connect(
    bool allowed, const std::function<at::Tensor(const at::Tensor&)>& all_gather) {
  const auto world = static_cast<int64_t>(peers_.size());
  const size_t bytes = Mailbox::size(world);
  const File file(allowed ? memfd_create("zero_ext", MFD_CLOEXEC) : -1);
  if (file.number() >= 0 && ftruncate(file.number(), static_cast<off_t>(bytes)) == 0)
    mailbox_ = Mailbox(file.number(), world);
  if (mailbox_.open()) allow_processes_of_the_launcher();

  const auto options = at::TensorOptions().dtype(at::kLong);
  at::Tensor mine = at::empty({6}, options);
  const int64_t introduction[6] = {mailbox_.open() ? 1 : 0,
                                   getpid(),
                                   file.number(),
                                   static_cast<int64_t>(reinterpret_cast<uintptr_t>(&nonce_)),
                                   nonce_[0],
                                   nonce_[1]};
  std::copy_n(introduction, 6, mine.mutable_data_ptr<int64_t>());
  const at::Tensor all = all_gather(mine);
  at::Tensor reached = at::empty({world}, options);
  auto* reach = reached.mutable_data_ptr<int64_t>();
  for (int64_t r = 0; r < world; ++r) {
    const int64_t* said = all.const_data_ptr<int64_t>() + r * 6;
    Peer& peer = peers_[r];
    peer.process = static_cast<pid_t>(said[1]);
    peer.nonce_address = static_cast<uint64_t>(said[3]);
    peer.nonce = {said[4], said[5]};
    reach[r] = 0;
    if (r == rank_ || !mailbox_.open() || said[0] == 0 || !is_alive(peer)) continue;
    const std::string path =
        "/proc/" + std::to_string(peer.process) + "/fd/" + std::to_string(said[2]);
    const File theirs(open(path.c_str(), O_RDWR | O_CLOEXEC));
    struct stat status{};
    if (theirs.number() < 0 || fstat(theirs.number(), &status) != 0) continue;
    if (status.st_size != static_cast<off_t>(bytes)) continue;
    peer.mailbox = Mailbox(theirs.number(), world);
    reach[r] = peer.mailbox.open() ? 1 : 0;
  }
  // When all have answered, all have opened this rank's file.
  const at::Tensor matrix = all_gather(reached);
  const auto* row = matrix.const_data_ptr<int64_t>();
  const auto reach_each_other = [&](int64_t a, int64_t b) {
    return row[a * world + b] != 0 && row[b * world + a] != 0;
  };
  bool any = false;
  for (int64_t a = 0; a < world; ++a) {
    peers_[a].reached = a != rank_ && reach_each_other(rank_, a);
    any = any || peers_[a].reached;
    for (int64_t b = 0; b < a; ++b) reaches_all_ = reaches_all_ && reach_each_other(a, b);
  }
  return any;
}

SharedHostTransport::Message LinuxSharedHostTransport::send(const at::Tensor& tensor, int64_t to,
                                                            const Label& label) {
  auto transfer = std::make_shared<Transfer>(
      Transfer{.tensor = tensor, .peer = to, .label = label, .sending = true});
  {
    const std::lock_guard lock(mutex_);
    const uint64_t number = sent_++;
    sending_.emplace(number, transfer);
    write(peers_[to], {.kind = Record::offered,
                       .number = number,
                       .tag = transfer->tag(),
                       .address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()),
                       .bytes = tensor.nbytes()});
    progress();
  }
  return c10::make_intrusive<MessageWork>(shared_from_this(), std::move(transfer));
}

SharedHostTransport::Message LinuxSharedHostTransport::receive(const at::Tensor& into, int64_t from,
                                                               const Label& label) {
  auto transfer =
      std::make_shared<Transfer>(Transfer{.tensor = into, .peer = from, .label = label});
  {
    const std::lock_guard lock(mutex_);
    receiving_.push_back(transfer);
    ++receiving_count_;
    progress();
  }
  return c10::make_intrusive<MessageWork>(shared_from_this(), std::move(transfer));
}

SharedHostTransport::Message LinuxSharedHostTransport::post(const at::Tensor& tensor, int64_t to,
                                                            const Label& label) {
  auto transfer = std::make_shared<Transfer>(
      Transfer{.tensor = tensor, .peer = to, .label = label, .done = true});
  {
    const std::lock_guard lock(mutex_);
    write(peers_[to], {.kind = Record::posted,
                       .number = 0,
                       .tag = transfer->tag(),
                       .address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()),
                       .bytes = tensor.nbytes()});
    progress();
  }
  return c10::make_intrusive<MessageWork>(shared_from_this(), std::move(transfer));
}

int64_t LinuxSharedHostTransport::next_epoch(Kind kind, int64_t last) {
  int64_t next = last + 1;
  if (reaches_all_) {  // else ranks would pass over different ones
    for (const Peer& peer : peers_) {
      if (!peer.reached) continue;
      next = std::max(next, peer.mailbox.doorbell().abandoned_epochs[index_of(kind)].load());
    }
  }
  show_epochs(kind, next);
  return next;
}

void LinuxSharedHostTransport::leave_epoch(Kind kind, int64_t epoch, Exit exit) {
  Doorbell& doorbell = mailbox_.doorbell();
  doorbell.dropped_epochs[index_of(kind)].store(epoch + 1);
  if (exit == Exit::abandoned) doorbell.abandoned_epochs[index_of(kind)].store(epoch + 1);
  if (exit != Exit::sent_all) show_epochs(kind, epoch + 1);
}

int64_t LinuxSharedHostTransport::who_abandoned(Kind kind, int64_t epoch) const {
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (!peers_[r].reached) continue;
    const Doorbell& doorbell = peers_[r].mailbox.doorbell();
    if (doorbell.abandoned_epochs[index_of(kind)].load() > epoch) return static_cast<int64_t>(r);
  }
  return -1;
}

void LinuxSharedHostTransport::show_epochs(Kind kind, int64_t first) {
  const std::lock_guard lock(mutex_);
  int64_t& shown = epochs_[index_of(kind)];
  shown = std::max(shown, first);
  progress();
}

void LinuxSharedHostTransport::write(Peer& peer, const Record& record) {
  if (peer.unwritten.empty() && peer.mailbox.from(rank_).try_write(record)) {
    peer.mailbox.doorbell().ring();
  } else {
    peer.unwritten.push_back(record);
  }
}

void LinuxSharedHostTransport::read_ring(int64_t rank) {
  Record record;
  while (mailbox_.from(rank).try_read(&record)) {
    if (record.kind == Record::offered) {
      peers_[rank].offered[record.tag].push_back(record);
      continue;
    }
    if (record.kind == Record::posted) {
      peers_[rank].posted.insert_or_assign(record.tag, record);
      continue;
    }
    const auto sent = sending_.find(record.number);
    if (sent == sending_.end()) continue;
    sent->second->done = true;
    sent->second->tensor.reset();
    sending_.erase(sent);
  }
}

void LinuxSharedHostTransport::progress() {
  bool all_written = true;
  for (size_t r = 0; r < peers_.size(); ++r) {
    Peer& peer = peers_[r];
    if (!peer.reached) continue;
    bool written = false;
    while (!peer.unwritten.empty() && peer.mailbox.from(rank_).try_write(peer.unwritten.front())) {
      peer.unwritten.pop_front();
      written = true;
    }
    if (written) peer.mailbox.doorbell().ring();
    all_written = all_written && peer.unwritten.empty();
    read_ring(static_cast<int64_t>(r));
  }
  // Behind all that was sent.
  for (size_t kind = 0; kind < epochs_.size() && all_written; ++kind) {
    std::atomic<int64_t>& shown = mailbox_.doorbell().rounds[kind];
    if (shown.load(std::memory_order_relaxed) != epochs_[kind]) shown.store(epochs_[kind]);
  }
  if (leaving_ && all_written) {
    leaving_ = false;
    mailbox_.doorbell().left.store(1);
    ring_all();
  }
  for (auto at = receiving_.begin(); at != receiving_.end();) {
    const bool ended = try_receive(**at);
    at = ended ? receiving_.erase(at) : std::next(at);
    if (ended) --receiving_count_;
  }
}

bool LinuxSharedHostTransport::try_receive(Transfer& transfer) {
  Peer& peer = peers_[transfer.peer];
  if (const auto posted = peer.posted.find(transfer.tag()); posted != peer.posted.end()) {
    read(peer, posted->second, transfer);
    peer.mailbox.doorbell().served.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  const auto found = peer.offered.find(transfer.tag());
  if (found == peer.offered.end()) return false;
  const Record message = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) peer.offered.erase(found);
  read(peer, message, transfer);
  write(peer,
        {.kind = Record::taken, .number = message.number, .tag = 0, .address = 0, .bytes = 0});
  return true;
}

void LinuxSharedHostTransport::read(const Peer& peer, const Record& message, Transfer& transfer) {
  if (message.bytes != transfer.tensor.nbytes()) {
    transfer.error = "it sent " + std::to_string(message.bytes) +
                     " bytes where this rank expects " + std::to_string(transfer.tensor.nbytes()) +
                     ", as if it were in another call.";
  } else if (message.bytes > 0) {
    const int failure = read_memory_of(peer.process, message.address,
                                       transfer.tensor.mutable_data_ptr(), message.bytes);
    // Asked after the copy: what was read before the end was still there.
    transfer.error = end_of(peer);
    if (failure != 0 && transfer.error.empty())
      transfer.error = std::string("its memory cannot be read: ") + std::strerror(failure) + ".";
  }
  transfer.done = transfer.error.empty();
  transfer.tensor.reset();
}

void LinuxSharedHostTransport::wait(const std::shared_ptr<Transfer>& transfer,
                                    milliseconds timeout) {
  const milliseconds limit = timeout == kNoTimeout ? timeout_ : timeout;
  const Clock::time_point begin = Clock::now();
  Clock::time_point looked = begin;
  Doorbell& doorbell = mailbox_.doorbell();
  int spins = kSpins;
  std::string end;
  for (;;) {
    const uint32_t seen = doorbell.rings.load();
    {
      const std::lock_guard lock(mutex_);
      progress();
      TORCH_CHECK(transfer->error.empty(), transfer->error);
      if (transfer->done) return;
    }
    TORCH_CHECK(end.empty(), end);
    while (spins > 0 && doorbell.rings.load(std::memory_order_relaxed) == seen) {
      pause();
      --spins;
    }
    if (spins > 0) continue;
    doorbell.sleep(seen, kSlice);
    if (is_dropped(*transfer)) return withdraw(transfer);
    // Then one more look at what it sent before.
    if (is_past(*transfer)) end = "after an error on some rank it went on without this.";
    const Clock::time_point now = Clock::now();
    if (now - looked < kSlice || !end.empty()) continue;
    looked = now;
    // Who has left sends shutdown handshake alone, which a peer takes although it has left as well.
    const Peer& peer = peers_[transfer->peer];
    end = transfer->sending && has_left_ ? end_of(peer) : end_of_messages(peer);
    if (!end.empty() || now - begin < limit) continue;
    {
      // This process may have been stopped meanwhile: what has come counts.
      const std::lock_guard lock(mutex_);
      progress();
      TORCH_CHECK(transfer->error.empty(), transfer->error);
      if (transfer->done) return;
    }
    const Label& label = transfer->label;
    if (label.epoch != kNoEpoch) leave_epoch(label.kind, label.epoch, Exit::abandoned);
    TORCH_CHECK(false, "timed out after ", limit.count(), " ms.");
  }
}

void LinuxSharedHostTransport::cancel(const std::shared_ptr<Transfer>& transfer) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find(receiving_.begin(), receiving_.end(), transfer);
  if (found == receiving_.end()) return;
  receiving_.erase(found);
  --receiving_count_;
}

void LinuxSharedHostTransport::withdraw(const std::shared_ptr<Transfer>& transfer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(sending_, [&](const auto& sent) { return sent.second == transfer; });
}

}  // namespace

void SharedHostTransport::withdraw(c10d::Work& message) {
  if (auto* ours = dynamic_cast<MessageWork*>(&message)) ours->withdraw();
}

std::shared_ptr<SharedHostTransport> SharedHostTransport::connect(
    int64_t rank, int64_t world, milliseconds timeout, bool allowed,
    const std::function<at::Tensor(const at::Tensor&)>& all_gather) {
  auto made = std::make_shared<LinuxSharedHostTransport>(rank, world, timeout);
  return made->connect(allowed, all_gather) ? made : nullptr;
}

}  // namespace zero_ext

#else  // no process_vm_readv

namespace zero_ext {

void SharedHostTransport::withdraw(c10d::Work&) {}

std::shared_ptr<SharedHostTransport> SharedHostTransport::connect(
    int64_t, int64_t, std::chrono::milliseconds, bool,
    const std::function<at::Tensor(const at::Tensor&)>&) {
  return nullptr;
}

}  // namespace zero_ext

#endif
