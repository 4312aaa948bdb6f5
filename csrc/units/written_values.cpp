#include "units/written_values.h"

#include <ATen/ops/empty_strided.h>

#include "kernels/digest.h"

namespace zero_ext {

int64_t WrittenValues::version_of(const Watched& slot) {
  const auto version = [](const at::Tensor& each) {
    return each.is_inference() ? 0 : static_cast<int64_t>(each._version());
  };
  // A write through a DTensor counts on the DTensor alone, one through its local tensor on that.
  return version(slot.parameter) + version(slot.local);
}

uint64_t WrittenValues::sum_of(int64_t i) const {
  if (!compares() || full_.emptied()) return 0;
  const Slot& slot = layout_.slot(i);
  const auto itemsize = static_cast<int64_t>(full_.tensor().element_size());
  return kernels::part_digest(full_.at(slot.offset), slot.spec.numel * itemsize, /*offset=*/0,
                              context_.compute.launch());
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
  slot.sum = sum_of(i);
  slot.digest = 0;
}

void WrittenValues::note_all(const std::function<bool(int64_t)>& differs) {
  for (int64_t i = 0; i < std::ssize(slots_); ++i) note(i, differs && differs(i));
}

void WrittenValues::accept_all() {
  for (int64_t i = 0; i < std::ssize(slots_); ++i) accept(i);
}

void WrittenValues::accept_written() {
  for (Watched& slot : slots_) slot.digest = 0;
}

int64_t WrittenValues::digest_now(int64_t i) const {
  const at::Tensor parameter = slots_[i].local.detach();
  const SlotSpec& spec = layout_.slot(i).spec;
  at::Tensor dense = parameter;
  if (parameter.strides() != at::IntArrayRef(spec.strides)) {
    dense = at::empty_strided(spec.sizes, spec.strides, parameter.options()).copy_(parameter);
  }
  return digest_of(dense.as_strided({spec.numel}, {1}));
}

int64_t WrittenValues::digest_of(const at::Tensor& flat) {
  const at::Tensor here = flat.cpu();
  const auto bytes = static_cast<int64_t>(here.nbytes());
  const uint64_t digest = kernels::digest(here.const_data_ptr(), bytes);
  return digest == 0 ? 1 : static_cast<int64_t>(digest);
}

}  // namespace zero_ext
