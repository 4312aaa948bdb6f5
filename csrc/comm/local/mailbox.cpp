#include "comm/local/mailbox.h"

#include <sys/mman.h>
#include <unistd.h>

#include <utility>

#include "comm/local/linux_calls.h"

namespace zero_ext {
namespace {

size_t size_of(int64_t world) { return sizeof(Board) + world * sizeof(Ring); }

}  // namespace

Mailbox::Mailbox(int descriptor, size_t bytes) : descriptor_(descriptor), bytes_(bytes) {
  if (descriptor < 0) return;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory != MAP_FAILED) memory_ = memory;
}

Mailbox Mailbox::create(int64_t world) {
  const size_t bytes = size_of(world);
  return {linux_calls::create_shared_memory(bytes), bytes};
}

Mailbox Mailbox::of(pid_t process, int64_t descriptor, int64_t world) {
  const size_t bytes = size_of(world);
  Mailbox mailbox(linux_calls::open_shared_memory(process, descriptor, bytes), bytes);
  mailbox.drop_descriptor();
  return mailbox;
}

Mailbox::Mailbox(Mailbox&& other) noexcept { *this = std::move(other); }

Mailbox& Mailbox::operator=(Mailbox&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(bytes_, other.bytes_);
  std::swap(memory_, other.memory_);
  return *this;
}

Mailbox::~Mailbox() {
  drop_descriptor();
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

void Mailbox::drop_descriptor() {
  if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
}

}  // namespace zero_ext
