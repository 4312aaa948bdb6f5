#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <unordered_map>

#include "capture.h"

// Of torch's OpenMP runtime, where it is loaded: a stream's copies need no team of threads.
extern "C" __attribute__((weak)) void omp_set_num_threads(int count);

namespace lagged {
namespace {

constexpr unsigned char kPoison = 0xff;
constexpr int64_t kArenaBytes = int64_t{1} << 36;  // of addresses; pages come with their first use
constexpr int64_t kGuardBytes = 64;
constexpr int64_t kAlignment = 512;

std::atomic<int64_t> lag_us{50'000};
std::atomic<bool> ends_with_error = false;
std::atomic<int64_t> allocations_left{-1};  // before the one that fails; negative: none does

std::atomic<bool> one_connection = false;
std::mutex connection_mutex;  // before a queue's own; protects:
std::array<Event, kDevices> last_queued;

std::mutex error_mutex;
std::string first_error;

void keep_error(const std::string& what) {
  const std::lock_guard lock(error_mutex);
  if (first_error.empty()) first_error = what.substr(0, what.find("\nException raised from"));
}

void throw_error() {
  std::string error;
  {
    const std::lock_guard lock(error_mutex);
    error.swap(first_error);
  }
  if (!error.empty()) throw std::runtime_error("lagged: a task failed: " + error);
}

int64_t clean_bytes(const char* data, int64_t bytes) {
  int64_t i = 0;
  const uint64_t poison = ~uint64_t{0};
  for (; i + 8 <= bytes; i += 8) {
    if (std::memcmp(data + i, &poison, 8) != 0) break;
  }
  while (i < bytes && static_cast<unsigned char>(data[i]) == kPoison) ++i;
  return i;
}

// Sizes in steps of at most a quarter, so that freed pieces fit later requests.
int64_t capacity_for(int64_t bytes) {
  const int64_t least = bytes + kGuardBytes;
  int64_t step = kAlignment;
  while (least > step * 8) step *= 2;
  return (least + step - 1) / step * step;
}

// Memory at addresses of its own.
class Arena {
 public:
  Arena() {
    void* base = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::runtime_error("lagged: mmap failed");
    base_ = static_cast<char*>(base);
  }

  bool holds(const void* pointer) const {
    return pointer >= base_ && pointer < base_ + kArenaBytes;
  }

  Block* allocate(int64_t bytes, Queue* owner) {
    const int64_t capacity = capacity_for(bytes);
    const std::lock_guard lock(mutex_);
    char* data = nullptr;
    auto& free = free_[{owner, capacity}];
    if (free.empty()) {
      if (used_ + capacity > kArenaBytes) throw std::runtime_error("lagged: out of memory");
      data = base_ + used_;
      used_ += capacity;
      std::memset(data, kPoison, capacity);
    } else {
      data = free.front();
      free.pop_front();
      check_released(data, capacity, owner);
    }
    stats_.allocated_bytes += bytes;
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.allocated_bytes);
    ++stats_.allocations;
    auto* block = new Block;
    block->data = data;
    block->bytes = bytes;
    block->capacity = capacity;
    block->owner = owner;
    live_[data] = block;
    return block;
  }

  void count_release(const Block& block) {
    const std::lock_guard lock(mutex_);
    live_.erase(block.data);
    stats_.allocated_bytes -= block.bytes;
    ++stats_.releases;
  }

  // Poisons the block and lets it be used again.
  void recycle(Block* block) {
    const int64_t guard = block->capacity - block->bytes;
    const int64_t clean = clean_bytes(block->data + block->bytes, guard);
    std::memset(block->data, kPoison, block->capacity);
    const std::lock_guard lock(mutex_);
    if (clean < guard) {
      faults_.push_back("written behind its end: byte " + std::to_string(clean) + " after " +
                        std::to_string(block->bytes) + " bytes of " + name_of(block->owner));
    }
    free_[{block->owner, block->capacity}].push_back(block->data);
    delete block;
  }

  Block* find(const void* begin) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(begin);
    return found == live_.end() ? nullptr : found->second;
  }

  MemoryStats stats() {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

  void reset_peak() {
    const std::lock_guard lock(mutex_);
    stats_.peak_bytes = stats_.allocated_bytes;
  }

  void take_faults(std::vector<std::string>& all) {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, free] : free_) {
      for (char* data : free) check_released(data, key.second, key.first);
    }
    all.insert(all.end(), faults_.begin(), faults_.end());
    faults_.clear();
  }

 private:
  static std::string name_of(Queue* owner) {
    if (owner == nullptr) return "pinned memory";
    return "lagged:" + std::to_string(owner->device) + ", stream " + std::to_string(owner->id);
  }

  void check_released(char* data, int64_t capacity, Queue* owner) {
    const int64_t clean = clean_bytes(data, capacity);
    if (clean == capacity) return;
    faults_.push_back("written after its release: byte " + std::to_string(clean) + " of up to " +
                      std::to_string(capacity - kGuardBytes) + " bytes of " + name_of(owner));
    std::memset(data, kPoison, capacity);
  }

  char* base_ = nullptr;
  std::mutex mutex_;  // protects all below
  int64_t used_ = 0;
  // Oldest first, so that released memory stays poisoned for long.
  std::map<std::pair<Queue*, int64_t>, std::deque<char*>> free_;
  std::unordered_map<const void*, Block*> live_;  // by their first byte
  std::vector<std::string> faults_;
  MemoryStats stats_;
};

struct Device {
  Arena memory;
  std::array<std::unique_ptr<Queue>, kStreams> streams;
  std::atomic<uint64_t> pool_turn{0};
  std::atomic<uint64_t> new_turn{0};
  std::mutex group_mutex;                         // protects:
  std::array<int, kGroupStreams> group_counts{};  // who has borrowed each
  int group_turn = 0;
};

// Never destroyed: stream threads outlive main().
struct Machine {
  std::array<Device, kDevices> devices;
  Arena pinned;
  Machine() {
    for (int device = 0; device < kDevices; ++device) {
      for (int64_t id = 0; id < kStreams; ++id) {
        devices[device].streams[id] = std::make_unique<Queue>(device, id);
      }
    }
  }
};

Machine& machine() {
  static auto* the_machine = new Machine();
  return *the_machine;
}

thread_local int this_device = 0;
thread_local std::array<int64_t, kDevices> this_stream{};

Arena& arena_of(const Block& block) {
  return block.pinned ? machine().pinned : machine().devices[block.device].memory;
}

}  // namespace

void set_lag_us(int64_t value) { lag_us = value; }
void set_one_connection(bool one) {
  const std::lock_guard lock(connection_mutex);
  last_queued = {};
  one_connection = one;
}
int64_t get_lag_us() { return lag_us; }

uint64_t Queue::push(std::function<void()> task) {
  std::vector<Task> finished;  // destroyed without the locks
  std::unique_lock<std::mutex> connection;
  Event* before = nullptr;
  if (one_connection) {
    connection = std::unique_lock(connection_mutex);
    before = &last_queued.at(device);
  }
  const std::lock_guard lock(mutex_);
  finished.swap(finished_);
  if (!started_) {
    started_ = true;
    std::thread([this] { work(); }).detach();
  }
  if (before != nullptr && before->queue != nullptr && before->queue != this) {
    add([last = *before] { last.queue->wait_quietly(last.ticket); });
  }
  add(std::move(task));
  if (before != nullptr) *before = {.queue = this, .ticket = queued_};
  return queued_;
}

void Queue::add(std::function<void()> task) {
  tasks_.push_back({std::move(task), Clock::now()});
  ++queued_;
  due_cv_.notify_one();
}

void Queue::push_wait(Queue& other, uint64_t ticket) {
  if (&other != this) push([&other, ticket] { other.wait_quietly(ticket); });
}

uint64_t Queue::last_ticket() {
  const std::lock_guard lock(mutex_);
  return queued_;
}

bool Queue::is_done(uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  const bool done = done_ >= ticket;
  demand(ticket);  // who asks again and again must be told some day
  return done;
}

void Queue::demand(uint64_t ticket) {
  if (demanded_ >= ticket) return;
  demanded_ = ticket;
  due_cv_.notify_one();
}

void Queue::await(std::unique_lock<std::mutex>& lock, uint64_t ticket) {
  demand(ticket);
  done_cv_.wait(lock, [&] { return done_ >= ticket; });
}

void Queue::wait_quietly(uint64_t ticket) {
  std::unique_lock lock(mutex_);
  await(lock, ticket);
}

bool Queue::wait_for(uint64_t ticket, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  demand(ticket);
  return done_cv_.wait_for(lock, timeout, [&] { return done_ >= ticket; });
}

void Queue::wait(uint64_t ticket) {
  std::vector<Task> finished;
  {
    std::unique_lock lock(mutex_);
    await(lock, ticket);
    finished.swap(finished_);
  }
  throw_error();
}

void Queue::work() {
  if (omp_set_num_threads != nullptr) omp_set_num_threads(1);
  this_device = device;
  this_stream[device] = id;
  std::unique_lock lock(mutex_);
  for (;;) {
    due_cv_.wait(lock, [&] { return !tasks_.empty(); });
    // Not all alike: streams that nobody orders do not run in the order of their calls.
    const auto due_at = tasks_.front().queued_at + std::chrono::microseconds(lag_us / (1 + id % 3));
    due_cv_.wait_until(lock, due_at, [&] { return demanded_ > done_ || Clock::now() >= due_at; });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    try {
      task.run();
    } catch (const std::exception& error) {
      if (ends_with_error) throw;  // out of a thread: std::terminate
      keep_error(error.what());
    }
    lock.lock();
    finished_.push_back(std::move(task));
    ++done_;
    done_cv_.notify_all();
  }
}

Queue& queue(int device, int64_t id) { return *machine().devices.at(device).streams.at(id); }

Queue* queue_of(void* handle) {
  for (Device& device : machine().devices) {
    for (auto& stream : device.streams) {
      if (stream.get() == handle) return stream.get();
    }
  }
  return nullptr;
}

int64_t next_pool_stream(int device) {
  return 1 + static_cast<int64_t>(machine().devices.at(device).pool_turn++ % kPoolStreams);
}

int64_t next_new_stream(int device) {
  return 1 + kPoolStreams +
         static_cast<int64_t>(machine().devices.at(device).new_turn++ % kNewStreams);
}

namespace {
std::atomic<int64_t> waits{0};
}  // namespace

void count_host_wait() {
  ++waits;
  capture::asked_by_host("waits for the device");
}
int64_t host_waits() { return waits; }

void synchronize(int device) {
  for (auto& stream : machine().devices.at(device).streams) stream->wait_all();
}

void synchronize_quietly(int device) {
  for (auto& stream : machine().devices.at(device).streams) {
    stream->wait_quietly(stream->last_ticket());
  }
}

int current_device() { return this_device; }
int exchange_device(int device) { return std::exchange(this_device, device); }
int64_t current_stream(int device) { return this_stream.at(device); }
int64_t exchange_stream(int device, int64_t id) {
  return std::exchange(this_stream.at(device), id);
}

constexpr int64_t kFirstGroupStream = 1 + kPoolStreams + kNewStreams;

int64_t borrow_group_stream(int device) {
  Device& its = machine().devices.at(device);
  const std::lock_guard lock(its.group_mutex);
  int best = its.group_turn;
  for (int i = 0; i < kGroupStreams; ++i) {
    const int candidate = (its.group_turn + i) % kGroupStreams;
    if (its.group_counts[candidate] < its.group_counts[best]) best = candidate;
  }
  ++its.group_counts[best];
  its.group_turn = (best + 1) % kGroupStreams;
  return kFirstGroupStream + best;
}

void give_back_group_stream(int device, int64_t id) {
  Device& its = machine().devices.at(device);
  const std::lock_guard lock(its.group_mutex);
  --its.group_counts.at(id - kFirstGroupStream);
}

Block* allocate(int device, int64_t bytes) {
  Block* block = machine().devices.at(device).memory.allocate(bytes, &current_queue(device));
  block->device = device;
  return block;
}

Block* allocate_pinned(int64_t bytes) {
  Block* block = machine().pinned.allocate(bytes, nullptr);
  block->pinned = true;
  return block;
}

void release(Block* block) {
  Arena& arena = arena_of(*block);
  arena.count_release(*block);
  if (block->pinned) capture::released(block->users);
  if (block->owner == nullptr && block->users.empty()) {
    arena.recycle(block);
    return;
  }
  // Every wait is for tasks that were queued before it, so streams cannot wait for each other.
  Queue* last = block->owner != nullptr ? block->owner : block->users.front();
  for (Queue* user : block->users) last->push_wait(*user, user->last_ticket());
  last->push([&arena, block] { arena.recycle(block); });
}

void record_use(Block* block, Queue& queue) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (&queue == block->owner) return;
  for (Queue* user : block->users) {
    if (user == &queue) return;
  }
  block->users.push_back(&queue);
}

Block* pinned_block(const void* begin) { return machine().pinned.find(begin); }

namespace {
struct Mapped {
  int device;
  int64_t bytes;
};
std::mutex mapped_mutex;
std::map<const char*, Mapped> mapped;  // by their beginnings
}  // namespace

void add_mapped(int device, const char* begin, int64_t bytes) {
  const std::lock_guard lock(mapped_mutex);
  mapped[begin] = {device, bytes};
}

void remove_mapped(const char* begin) {
  const std::lock_guard lock(mapped_mutex);
  mapped.erase(begin);
}

int device_of(const void* pointer) {
  {
    const std::lock_guard lock(mapped_mutex);
    const auto* byte = static_cast<const char*>(pointer);
    auto after = mapped.upper_bound(byte);
    if (after != mapped.begin()) {
      --after;
      if (byte < after->first + after->second.bytes) return after->second.device;
    }
  }
  for (int device = 0; device < kDevices; ++device) {
    if (machine().devices[device].memory.holds(pointer)) return device;
  }
  return -1;
}

bool is_pinned(const void* pointer) { return machine().pinned.holds(pointer); }

MemoryStats memory_stats(int device) { return machine().devices.at(device).memory.stats(); }
MemoryStats pinned_stats() { return machine().pinned.stats(); }
void fail_after(int64_t count) { allocations_left = count; }
bool allocation_fails() { return allocations_left >= 0 && allocations_left-- == 0; }
void reset_peak(int device) { machine().devices.at(device).memory.reset_peak(); }

std::vector<std::string> faults() {
  for (int device = 0; device < kDevices; ++device) synchronize(device);
  std::vector<std::string> all;
  for (Device& device : machine().devices) device.memory.take_faults(all);
  machine().pinned.take_faults(all);
  for (std::string& fault : capture::faults()) all.push_back(std::move(fault));
  return all;
}

}  // namespace lagged

LAGGED_EXPORT void lagged_set_lag_us(int64_t lag_us) { lagged::set_lag_us(lag_us); }
LAGGED_EXPORT void lagged_set_one_connection(bool one) { lagged::set_one_connection(one); }
LAGGED_EXPORT int64_t lagged_host_waits() { return lagged::host_waits(); }
LAGGED_EXPORT void lagged_fail_after(int64_t count) { lagged::fail_after(count); }
LAGGED_EXPORT void lagged_end_with_errors() { lagged::ends_with_error = true; }

LAGGED_EXPORT int64_t lagged_lag_us() { return lagged::get_lag_us(); }
LAGGED_EXPORT int lagged_device_count() { return lagged::kDevices; }
LAGGED_EXPORT void* lagged_stream_handle(int device, int64_t id) {
  return &lagged::queue(device, id);
}
LAGGED_EXPORT int64_t lagged_allocated_bytes(int device) {
  return (device < 0 ? lagged::pinned_stats() : lagged::memory_stats(device)).allocated_bytes;
}
LAGGED_EXPORT int64_t lagged_peak_bytes(int device) {
  return (device < 0 ? lagged::pinned_stats() : lagged::memory_stats(device)).peak_bytes;
}
LAGGED_EXPORT int64_t lagged_allocations(int device) {
  return (device < 0 ? lagged::pinned_stats() : lagged::memory_stats(device)).allocations;
}
LAGGED_EXPORT void lagged_reset_peak(int device) { lagged::reset_peak(device); }

// Waits for everything, whatever became of it.
LAGGED_EXPORT void lagged_finish() {
  for (int device = 0; device < lagged::kDevices; ++device) lagged::synchronize_quietly(device);
}

// One fault per line. The text is the calling thread's until its next call.
LAGGED_EXPORT const char* lagged_faults() {
  static thread_local std::string text;
  text.clear();
  try {
    for (const std::string& fault : lagged::faults()) text += fault + "\n";
  } catch (const std::exception& error) {
    text += error.what();
  }
  return text.c_str();
}
