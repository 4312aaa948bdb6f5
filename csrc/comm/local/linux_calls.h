// What the shared-host transport asks of the operating system. Only Linux has these calls: on other
// systems all of them fail, no rank reaches another one, and messages go through the process groups.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace zero_ext::linux_calls {

// Copies from the memory of another process. Returns 0, or an errno.
int read_memory_of(pid_t process, uint64_t address, void* into, size_t bytes);

// While one of these lives, all processes of this one's launcher may read its memory, as far as
// Yama allows that.
class ReadsWithinTheLaunch {
 public:
  ReadsWithinTheLaunch();
  ~ReadsWithinTheLaunch();
  ReadsWithinTheLaunch(const ReadsWithinTheLaunch&) = delete;
  ReadsWithinTheLaunch& operator=(const ReadsWithinTheLaunch&) = delete;
  // How many live in this process.
  static int64_t count();
};
// A number that processes have in common which may read each other's memory: of the running system
// and of the user. 0 where it is not known.
int64_t system_and_user();

// Memory that other processes can map: the descriptor of a file without a name, or -1. No process
// can change its size.
int create_shared_memory(size_t bytes);
// The same of another process, by the descriptor that it has there; -1 where it cannot be opened,
// has another size, or its size can change.
int open_shared_memory(pid_t process, int64_t descriptor, size_t bytes);

// Sleeps until wake_all(word), for `timeout` at most. Returns at once where *word is not `seen`.
void sleep_on(std::atomic<uint32_t>* word, uint32_t seen, std::chrono::milliseconds timeout);
void wake_all(std::atomic<uint32_t>* word);

}  // namespace zero_ext::linux_calls
