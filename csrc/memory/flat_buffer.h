// FlatBuffer: one storage that holds a unit's elements side by side, and counts its bytes.
//
// Owner:   a Unit, a Bucket or an optimizer's state. Views of the storage are lent out. The storage
//          object never changes identity, so that views stay valid when the buffer grows.
// Threads: not synchronised; the owner's lock protects it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/torch_internals.h"
#include "memory/memory.h"
#include "memory/storage.h"

namespace zero_ext {

// The purpose that a byte is held for; the keys of stats()["bytes"].
enum class Held : int { full, shard, master, grad, bucket, optimizer_state };
constexpr std::array<std::string_view, 6> kHeldNames{"full", "shard",  "master",
                                                     "grad", "bucket", "optimizer_state"};

// The bytes that one engine holds, and the most that it has held. Buffers keep the counter alive.
class MemoryCounter {
 public:
  // No more than `limit` bytes may be held.
  explicit MemoryCounter(int64_t limit = std::numeric_limits<int64_t>::max()) : limit_(limit) {}
  // To be called before `bytes` are allocated. Throws, and counts nothing, where they would exceed
  // the limit.
  void add(Held held, int64_t bytes);
  void subtract(Held held, int64_t bytes);
  int64_t bytes(Held held) const { return bytes_[static_cast<int>(held)]; }
  int64_t total() const { return total_; }
  int64_t peak() const { return peak_; }

 private:
  int64_t limit_;
  std::array<std::atomic<int64_t>, kHeldNames.size()> bytes_{};
  std::atomic<int64_t> total_{0};
  std::atomic<int64_t> peak_{0};
};

// Memory of buffers that were released within one pass, kept for the next buffers of the same size.
// It never exceeds what was held at once: when new memory is needed, blocks that do not fit are
// freed first.
class SpareMemory {
 public:
  SpareMemory(std::shared_ptr<MemoryCounter> counter, Held held, Place place)
      : counter_(std::move(counter)), held_(held), place_(place) {}
  ~SpareMemory() { clear(); }
  c10::DataPtr take(int64_t bytes);
  void give(c10::DataPtr memory, int64_t bytes);
  // Gives all blocks up. On the host the next pass may still find their pages in memory.
  void clear();
  // The same, and returns the pages to the system at once.
  void trim();

 private:
  struct Block {
    c10::DataPtr memory;
    int64_t bytes;
  };
  std::shared_ptr<MemoryCounter> counter_;
  Held held_;
  Place place_;
  std::shared_ptr<TransientMemory> source_ = std::make_shared<TransientMemory>();
  std::vector<Block> blocks_;
};

class FlatBuffer {
 public:
  FlatBuffer() = default;
  // `numel` elements of `dtype`, not initialised.
  FlatBuffer(std::shared_ptr<MemoryCounter> counter, Held held, Place place, at::ScalarType dtype,
             int64_t numel);
  // Over memory that `make` returns, once its bytes are counted.
  static FlatBuffer over(std::shared_ptr<MemoryCounter> counter, Held held, at::ScalarType dtype,
                         int64_t numel, const std::function<c10::DataPtr()>& make);
  // A buffer whose storage has no memory, as after empty().
  static FlatBuffer without_memory(std::shared_ptr<MemoryCounter> counter, Held held, Place place,
                                   at::ScalarType dtype, int64_t numel, const std::string& message);
  FlatBuffer(FlatBuffer&& other) noexcept { *this = std::move(other); }
  FlatBuffer& operator=(FlatBuffer&& other) noexcept;
  ~FlatBuffer() { release(); }

  bool defined() const { return tensor_.defined(); }
  bool emptied() const { return emptied_; }
  // Whether somebody still holds a view that was lent.
  bool lent() const { return is_shared(tensor_.storage()); }
  int64_t numel() const { return tensor_.defined() ? tensor_.numel() : 0; }
  const at::Tensor& tensor() const { return tensor_; }  // [numel]
  void* data() const { return tensor_.data_ptr(); }
  void* at(int64_t element) const;
  c10::Device device() const { return place_.device; }

  // The first `numel` elements of the storage read as `dtype`, 1-D.
  at::Tensor typed(at::ScalarType dtype, int64_t numel) const;
  // [numel] elements from `offset`, 1-D.
  at::Tensor slice(int64_t offset, int64_t numel) const;
  // A tensor of any dense shape over the elements from `offset`.
  at::Tensor view(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) const;

  void fill_zero();
  // Copies the first `bytes` of another buffer, on any device, over the first bytes of this one.
  void copy_begin(const FlatBuffer& source, size_t bytes);
  // Takes the storage's memory away: to `spare` on the host, to the allocator on a device, where
  // activations can use it. It is reused only after the work queued on the current stream. The
  // storage and its views stay; reading a view raises `message` until allocate().
  void empty(SpareMemory& spare, const std::string& message);
  // Gives the storage memory again, not initialised.
  void allocate(SpareMemory& spare);
  // A buffer with the memory that allocate() would give to this one, and take_memory_of() does.
  FlatBuffer incoming(SpareMemory& spare) const;
  void take_memory_of(FlatBuffer& other);
  // empty() and allocate() with memory of the allocator's.
  void empty(const std::string& message);
  void allocate();
  // The values are not needed any more: on the host the system may reclaim the pages, see
  // zero_ext::discard.
  void discard();
  // On a device: moves the bytes to pinned host memory, which `host` counts. Reading a view raises
  // `message` until reload(). A buffer without memory, or on the host, stays as it is.
  void offload(const std::shared_ptr<MemoryCounter>& host, const std::string& message);
  void reload();
  bool offloaded() const { return offloaded_memory_.defined(); }
  // Enlarges to `numel` elements. Old elements keep their values, new ones are zero, and every view
  // stays valid.
  void grow(int64_t numel);
  // On a device: the memory is not reused before all work queued on `stream` so far is done. To be
  // called where `stream` is not the stream that the memory was allocated on.
  void record_use(const c10::Stream& stream) const;
  // Makes the buffer undefined. A device's memory is reused only after the work queued on the
  // current stream.
  void drop();
  // Gives the buffer up. Views that were lent keep the storage alive.
  void release();

 private:
  c10::StorageImpl& storage() const { return *tensor_.storage().unsafeGetStorageImpl(); }

  std::shared_ptr<MemoryCounter> counter_;
  Held held_ = Held::full;
  Place place_;
  bool emptied_ = false;
  at::Tensor tensor_;
  OffloadedStorage offloaded_memory_;
  std::shared_ptr<MemoryCounter> offloaded_counter_;
};

}  // namespace zero_ext
