// The machine behind the device "lagged": streams that lag behind the host, and memory that shows
// who used it too early or too late. Knows nothing of torch.
//
// Note [What a missing wait looks like here]
// A queued task runs when somebody waits for it, or when the lag has passed: as late as it may. Two
// streams that do not wait for each other therefore run in the order that hurts: what a stream
// should have waited for has not happened, and what it should have been waited for by happens too
// late. Memory is 0xff (NaN in every float type, -1 in every integer) until a task has written it,
// and again once its stream has reached its release. So whoever reads without waiting finds NaN, or
// the value before or after the right one; whoever writes to released memory, or behind the end of
// his own, is counted in faults(). No memory is ever unmapped, so mistakes are seen in values and
// counts, not as crashes.
//
// Threads: everything here may be called from any thread. Objects live until the process ends.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace lagged {

constexpr int kDevices = 2;
constexpr int kPoolStreams = 16;   // handed out in turn, as on CUDA
constexpr int kNewStreams = 48;    // likewise, for torch.Stream()
constexpr int kGroupStreams = 32;  // for process groups: nobody else's work hides what they miss
constexpr int kStreams = 1 + kPoolStreams + kNewStreams + kGroupStreams;

// How long a task that nobody waits for is held back. 50,000 at first; with 0 streams run freely.
void set_lag_us(int64_t lag_us);
int64_t get_lag_us();
// Whether all streams of a device have one connection to it, as by CUDA_DEVICE_MAX_CONNECTIONS=1:
// a task then begins when all that was queued before it, on whatever stream, is done.
void set_one_connection(bool one);

// One stream: tasks run in order, on a thread of their own that starts with the first task.
//
// Ticket n is done when the first n tasks are. Who asks for a ticket, whether he waits or not, lets
// the tasks up to it run.
// Invariant: done_ <= queued_ and demanded_ <= queued_.
// A task that throws ends nothing: the next wait() of any queue throws the first such error.
class Queue {
 public:
  Queue(int device, int64_t id) : device(device), id(id) {}

  // Returns the task's ticket. What the task owns is destroyed by a later push() or wait(), never
  // by the stream's thread: it may own Python objects, and the host may wait with the GIL held.
  uint64_t push(std::function<void()> task);
  // Later tasks of this queue run when `other` has done `ticket`.
  void push_wait(Queue& other, uint64_t ticket);

  uint64_t last_ticket();
  bool is_done(uint64_t ticket);
  void wait(uint64_t ticket);          // throws std::runtime_error if a task of any queue failed
  void wait_quietly(uint64_t ticket);  // for the threads of other queues
  bool wait_for(uint64_t ticket, std::chrono::milliseconds timeout);  // true: it is done
  void wait_all() { wait(last_ticket()); }

  const int device;
  const int64_t id;

 private:
  using Clock = std::chrono::steady_clock;
  struct Task {
    std::function<void()> run;
    Clock::time_point queued_at;
  };
  void work();
  void add(std::function<void()> task);  // with the lock held
  void demand(uint64_t ticket);          // with the lock held
  void await(std::unique_lock<std::mutex>& lock, uint64_t ticket);

  std::mutex mutex_;
  std::condition_variable due_cv_;   // of the stream's thread
  std::condition_variable done_cv_;  // of who waits
  std::deque<Task> tasks_;
  std::vector<Task> finished_;
  uint64_t queued_ = 0;
  uint64_t demanded_ = 0;
  uint64_t done_ = 0;
  bool started_ = false;
};

Queue& queue(int device, int64_t id);
Queue* queue_of(void* handle);  // null where `handle` is no stream of this device
int64_t next_pool_stream(int device);
int64_t next_new_stream(int device);
// The group stream that fewest have borrowed.
int64_t borrow_group_stream(int device);
void give_back_group_stream(int device, int64_t id);
void synchronize(int device);  // throws as Queue::wait()

// How often the host has waited where it would wait for a real device: reads of values, copies that
// block, events, streams. Operators that drain their stream for want of better do not count.
void count_host_wait();
int64_t host_waits();
void synchronize_quietly(int device);

// Of the calling thread.
int current_device();
int exchange_device(int device);
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t id);
inline Queue& current_queue(int device) { return queue(device, current_stream(device)); }

// A moment of a stream. Copies are the same moment.
struct Event {
  Queue* queue = nullptr;  // null: never recorded
  uint64_t ticket = 0;
  std::shared_ptr<double> time_ms;  // written when the moment is reached; null: not timed
  uint64_t graph = 0;               // that it was captured into, see capture.h; 0: none
};

// A piece of device memory, or of pinned host memory.
struct Block {
  char* data = nullptr;
  int64_t bytes = 0;     // as asked for
  int64_t capacity = 0;  // bytes, the guard behind them included
  int device = 0;
  bool pinned = false;
  Queue* owner = nullptr;     // the stream that it was allocated for; null for pinned memory
  std::vector<Queue*> users;  // record_use()
};

// Device memory of `device` for its current stream; bytes > 0. Filled with 0xff when it returns.
Block* allocate(int device, int64_t bytes);
Block* allocate_pinned(int64_t bytes);
// Memory is poisoned and reusable when its stream, and what record_use() named, has done the work
// queued until now. Device memory is reused for its own stream only.
void release(Block* block);
// The use of `block` by the work that `queue` has when the block is released.
void record_use(Block* block, Queue& queue);

// From now on `bytes` from `begin` count as memory of `device`: it was mapped for other processes, or
// from one. Not any more.
void add_mapped(int device, const char* begin, int64_t bytes);
void remove_mapped(const char* begin);

// The device whose memory holds `pointer`, or -1.
int device_of(const void* pointer);
bool is_pinned(const void* pointer);
// The pinned memory that begins there, or null.
Block* pinned_block(const void* begin);

struct MemoryStats {
  int64_t allocated_bytes = 0;  // as asked for, until release() is called
  int64_t peak_bytes = 0;
  int64_t allocations = 0;  // since the process began
  int64_t releases = 0;
};
MemoryStats memory_stats(int device);
MemoryStats pinned_stats();
void reset_peak(int device);

// From now on one allocation of a device or of pinned memory fails, after `count` that succeed.
// A negative count: none fails.
void fail_after(int64_t count);
// Counts one allocation; whether it is the one that fails.
bool allocation_fails();

// What was written where nobody may write: into memory after its release, or behind its end. Found
// when memory is released or reused, and by this call, which looks at all released memory once its
// streams are done. Returns descriptions, and forgets them.
std::vector<std::string> faults();

}  // namespace lagged

// For Python, through ctypes.
#define LAGGED_EXPORT extern "C" __attribute__((visibility("default")))
