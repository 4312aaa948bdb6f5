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

// Lets all processes of this one's launcher read its memory, as far as Yama allows that.
void allow_reads_within_the_launch();

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
