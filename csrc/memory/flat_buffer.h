// FlatBuffer: one storage that holds a unit's elements side by side, and the count of the bytes it
// takes.
//
// Owner:     a Unit, a Bucket or an optimizer's state. Views of the storage are lent out; the
// storage object never
//            changes identity, so that views stay valid when the buffer grows.
// Threads:   not synchronised; the owner's lock protects it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstdint>
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

// What a byte is held for; the keys of stats()["bytes"].
enum class Held : int { full, shard, master, grad, bucket, optimizer_state };
constexpr std::array<std::string_view, 6> kHeldNames{"full", "shard",  "master",
                                                     "grad", "bucket", "optimizer_state"};

// Bytes held now and at most, of one engine. Buffers keep it alive.
class MemoryCounter {
 public:
  // No more than `limit` bytes may be held.
  explicit MemoryCounter(int64_t limit = std::numeric_limits<int64_t>::max()) : limit_(limit) {}
  // Before `bytes` are allocated. Throws where they would exceed the limit, and counts nothing.
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

// Host memory that released buffers gave up within one pass, for the next ones of the same size.
// Never more than was held at once: what fits nobody goes as soon as somebody needs new memory.
class SpareMemory {
 public:
  SpareMemory(std::shared_ptr<MemoryCounter> counter, Held held, Place place)
      : counter_(std::move(counter)), held_(held), place_(place) {}
  ~SpareMemory() { clear(); }
  c10::DataPtr take(int64_t bytes);
  void give(c10::DataPtr memory, int64_t bytes);
  // Nothing is held any more; on the host, the next pass may still find the pages where they are.
  void clear();
  // The same, and the pages go back to the system at once.
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
  // A storage without memory: as after empty().
  static FlatBuffer without_memory(std::shared_ptr<MemoryCounter> counter, Held held, Place place,
                                   at::ScalarType dtype, int64_t numel, const std::string& message);
  FlatBuffer(FlatBuffer&& other) noexcept { *this = std::move(other); }
  FlatBuffer& operator=(FlatBuffer&& other) noexcept;
  ~FlatBuffer() { release(); }

  bool defined() const { return tensor_.defined(); }
  bool emptied() const { return emptied_; }
  // Views that were lent are still held.
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
  // The first `bytes` of another buffer, on any device, into the first of this one.
  void copy_begin(const FlatBuffer& source, size_t bytes);
  // Gives the memory to `spare`; that of a device to its allocator, which has activations for it,
  // after what the current stream was given. The storage stays, and so do its views; reading one
  // raises `message`, until allocate() gives the storage memory again, not initialised.
  void empty(SpareMemory& spare, const std::string& message);
  void allocate(SpareMemory& spare);
  // The same, with the allocator's memory.
  void empty(const std::string& message);
  void allocate();
  // The values are needed no more: on the host the system may take the pages, see
  // zero_ext::discard.
  void discard();
  // On a device: its bytes go to pinned host memory, which `host` counts, and come back. Reading a
  // view raises `message` meanwhile. What has no memory, or lies on the host, stays as it is.
  void offload(const std::shared_ptr<MemoryCounter>& host, const std::string& message);
  void reload();
  bool offloaded() const { return offloaded_memory_.defined(); }
  // Enlarges to `numel` elements; the old ones keep their values, the new ones are zero, every view
  // stays valid.
  void grow(int64_t numel);
  // On a device: the memory, which belongs to the stream that it was allocated on, is not reused
  // before what `stream` was given so far is done.
  void record_use(const c10::Stream& stream) const;
  // Becomes an undefined one. A device's memory is not reused before what the current stream was
  // given is done.
  void drop();
  // Gives the buffer up; views that were lent keep the storage alive.
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
