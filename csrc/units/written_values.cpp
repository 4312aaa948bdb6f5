#include "units/written_values.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "kernels/digest.h"

namespace zero_ext {
namespace {

int64_t digest_of_bytes(const void* data, int64_t bytes) {
  const uint64_t digest = kernels::part_digest(data, bytes, /*offset=*/0, cpu_launch());
  return static_cast<int64_t>(std::max<uint64_t>(digest, 1));
}

}  // namespace

int64_t WrittenValues::version_of(const Watched& slot) {
  const auto version = [](const at::Tensor& each) -> int64_t {
    return each.is_inference() ? 0 : each._version();
  };
  // A write through a DTensor counts on the DTensor alone, one through its local tensor on that.
  return version(slot.parameter) + version(slot.local);
}

int64_t WrittenValues::sum_of(int64_t i) const {
  if (!compares() || full_.emptied()) return 0;
  const Slot& slot = layout_.slot(i);
  const auto itemsize = static_cast<int64_t>(full_.tensor().element_size());
  return digest_of_bytes(full_.at(slot.offset), slot.spec.numel * itemsize);
}

void WrittenValues::watch(int64_t i, const at::Tensor& parameter, const at::Tensor& local) {
  if (i >= std::ssize(slots_)) slots_.resize(i + 1);
  slots_[i].parameter = parameter;
  slots_[i].local = local;
  accept(i);
}

void WrittenValues::take_sums() {
  for (int64_t i = 0; i < std::ssize(slots_); ++i) {
    Watched& slot = slots_[i];
    if (slot.sum == 0 || slot.digest != 0) slot.sum = sum_of(i);
  }
}

void WrittenValues::note(int64_t i, bool differs) {
  if (!watches(i) || (full_.emptied() && !differs)) return;
  Watched& slot = slots_[i];
  if (stay_ && compares()) {
    slot.digest = differs ? digest_now(i) : sum_of(i);
    return;
  }
  const int64_t version = version_of(slot);
  if (!differs && version == slot.version && sum_of(i) == slot.sum) return;
  slot.version = version;
  slot.sum = sum_of(i);
  slot.digest = digest_now(i);
}

void WrittenValues::accept(int64_t i) {
  if (!watches(i)) return;
  Watched& slot = slots_[i];
  slot.version = version_of(slot);
  slot.sum = stay_ ? 0 : sum_of(i);
  slot.digest = 0;
}

void WrittenValues::note_all(const std::function<bool(int64_t)>& differs) {
  for (int64_t i = 0; i < std::ssize(slots_); ++i) note(i, differs && differs(i));
}

void WrittenValues::accept_all() {
  for (int64_t i = 0; i < std::ssize(slots_); ++i) accept(i);
}

int64_t WrittenValues::digest_now(int64_t i) const {
  at::Tensor dense = slots_[i].local.detach();
  const SlotSpec& spec = layout_.slot(i).spec;
  if (dense.strides() != at::IntArrayRef(spec.strides)) {
    dense = at::empty_strided(spec.sizes, spec.strides, dense.options()).copy_(dense);
  }
  return digest_of(dense.as_strided({spec.numel}, {1}));
}

int64_t WrittenValues::digest_of(const at::Tensor& flat) {
  const at::Tensor here = flat.cpu();
  return digest_of_bytes(here.const_data_ptr(), static_cast<int64_t>(here.nbytes()));
}

}  // namespace zero_ext
