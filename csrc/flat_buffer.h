// FlatBuffer: one storage that holds a unit's elements side by side, and the count of the bytes it
// takes.
//
// Owner:     a Unit, a Bucket or an optimizer's state. Views of the storage are lent out; the
// storage object never
//            changes identity, so that views stay valid when the buffer grows.
// Threads:   not synchronised; the owner's lock protects it.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

namespace zero_ext {

// What a byte is held for; the keys of stats()["bytes"].
enum class Held : int { full, master, grad, bucket, optimizer_state };
constexpr std::array<std::string_view, 5> kHeldNames{"full", "master", "grad", "bucket",
                                                     "optimizer_state"};

// Bytes held now and at most, of one engine. Buffers keep it alive.
class MemoryCounter {
 public:
  void add(Held held, int64_t bytes);
  int64_t bytes(Held held) const { return bytes_[static_cast<int>(held)]; }
  int64_t total() const { return total_; }
  int64_t peak() const { return peak_; }

 private:
  std::array<std::atomic<int64_t>, kHeldNames.size()> bytes_{};
  std::atomic<int64_t> total_{0};
  std::atomic<int64_t> peak_{0};
};

class FlatBuffer {
 public:
  FlatBuffer() = default;
  // `numel` elements of `dtype` in host memory, not initialised.
  FlatBuffer(std::shared_ptr<MemoryCounter> counter, Held held, at::ScalarType dtype,
             int64_t numel);
  FlatBuffer(FlatBuffer&& other) noexcept { *this = std::move(other); }
  FlatBuffer& operator=(FlatBuffer&& other) noexcept;
  ~FlatBuffer() { release(); }

  bool defined() const { return tensor_.defined(); }
  int64_t numel() const { return tensor_.defined() ? tensor_.numel() : 0; }
  const at::Tensor& tensor() const { return tensor_; }  // [numel]
  void* data() const { return tensor_.data_ptr(); }
  void* at(int64_t element) const;

  // The first `numel` elements of the storage read as `dtype`, 1-D.
  at::Tensor typed(at::ScalarType dtype, int64_t numel) const;
  // [numel] elements from `offset`, 1-D.
  at::Tensor slice(int64_t offset, int64_t numel) const;
  // A tensor of any dense shape over the elements from `offset`.
  at::Tensor view(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) const;

  void fill_zero();
  // Enlarges to `numel` elements; the old ones keep their values, the new ones are zero, every view
  // stays valid.
  void grow(int64_t numel);
  // Gives the buffer up; views that were lent keep the storage alive.
  void release();

 private:
  std::shared_ptr<MemoryCounter> counter_;
  Held held_ = Held::full;
  at::Tensor tensor_;
};

}  // namespace zero_ext
