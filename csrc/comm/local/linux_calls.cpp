#include "comm/local/linux_calls.h"

#include <cerrno>

#if defined(__linux__)

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#include <fstream>
#include <functional>
#include <mutex>
#include <string>

namespace zero_ext::linux_calls {

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

// Yama's ptrace_scope 1: only ancestors of a process read its memory, and one more process that it
// names, with the descendants of that one. The other ranks have the same launcher as this rank.
void name_reader(pid_t reader) {
  int scope = 0;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope;
  if (scope == 1) prctl(PR_SET_PTRACER, reader, 0, 0, 0);
}

std::mutex counting;
int64_t living = 0;

ReadsWithinTheLaunch::ReadsWithinTheLaunch() {
  const std::lock_guard lock(counting);
  if (living++ == 0) name_reader(getppid());
}

ReadsWithinTheLaunch::~ReadsWithinTheLaunch() {
  const std::lock_guard lock(counting);
  if (--living == 0) name_reader(0);
}

int64_t ReadsWithinTheLaunch::count() {
  const std::lock_guard lock(counting);
  return living;
}

int64_t system_and_user() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  if (boot.empty()) return 0;
  boot += ' ' + std::to_string(getuid());
  return static_cast<int64_t>(std::hash<std::string>{}(boot) | 1);
}

// A file that another process of the user shortens would end the ranks that read it with SIGBUS.
constexpr int kFixedSize = F_SEAL_SHRINK | F_SEAL_GROW;

int create_shared_memory(size_t bytes) {
  const int file = memfd_create("zero_ext", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) return -1;
  if (ftruncate(file, static_cast<off_t>(bytes)) == 0 &&
      fcntl(file, F_ADD_SEALS, kFixedSize | F_SEAL_SEAL) == 0) {
    return file;
  }
  close(file);
  return -1;
}

int open_shared_memory(pid_t process, int64_t descriptor, size_t bytes) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return -1;
  struct stat status{};
  const int seals = fcntl(file, F_GET_SEALS);
  if (fstat(file, &status) == 0 && status.st_size == static_cast<off_t>(bytes) && seals >= 0 &&
      (seals & kFixedSize) == kFixedSize) {
    return file;
  }
  close(file);
  return -1;
}

void sleep_on(std::atomic<uint32_t>* word, uint32_t seen, std::chrono::milliseconds timeout) {
  const timespec limit{.tv_sec = timeout.count() / 1000,
                       .tv_nsec = timeout.count() % 1000 * 1'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace zero_ext::linux_calls

#else

namespace zero_ext::linux_calls {

int read_memory_of(pid_t, uint64_t, void*, size_t) { return ENOSYS; }
ReadsWithinTheLaunch::ReadsWithinTheLaunch() {}
ReadsWithinTheLaunch::~ReadsWithinTheLaunch() {}
int64_t ReadsWithinTheLaunch::count() { return 0; }
int64_t system_and_user() { return 0; }
int create_shared_memory(size_t) { return -1; }
int open_shared_memory(pid_t, int64_t, size_t) { return -1; }
void sleep_on(std::atomic<uint32_t>*, uint32_t, std::chrono::milliseconds) {}
void wake_all(std::atomic<uint32_t>*) {}

}  // namespace zero_ext::linux_calls

#endif
