#include "units/written_values.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstring>

#include "kernels/digest.h"

namespace zero_ext {

int64_t WrittenValues::version_of(const Watched& slot) {
  const auto version = [](const at::Tensor& each) {
    return each.is_inference() ? 0 : static_cast<int64_t>(each._version());
  };
  // A write through a DTensor counts on the DTensor alone, one through its local tensor on that.
  return version(slot.parameter) + version(slot.local);
}

uint64_t WrittenValues::sample_of(int64_t i) const {
  const Slot& slot = layout_.slot(i);
  if (samples_ == Samples::none || full_.emptied() || slot.spec.numel == 0) return 0;
  const size_t itemsize = full_.tensor().element_size();
  const char* const begin = static_cast<const char*>(full_.data()) + slot.offset * itemsize;
  if (samples_ == Samples::all)
    return kernels::digest(begin, slot.spec.numel * static_cast<int64_t>(itemsize));
  const auto element = [&](int64_t element) {
    uint32_t bits = 0;
    std::memcpy(&bits, begin + element * itemsize, std::min(itemsize, sizeof(bits)));
    return bits;
  };
  return (uint64_t{element(slot.spec.numel / 2)} << 32) | element(slot.spec.numel / 4);
}

void WrittenValues::watch(int64_t i, const at::Tensor& parameter, const at::Tensor& local) {
  if (i >= std::ssize(slots_)) slots_.resize(i + 1);
  slots_[i].parameter = parameter;
  slots_[i].local = local;
  accept(i);
}

void WrittenValues::take_samples() {
  for (int64_t i = 0; i < std::ssize(slots_); ++i) {
    Watched& slot = slots_[i];
    // A later write may be seen on one rank alone, and then its digest would not be this one.
    if (samples_ != Samples::none && slot.digest != 0 && digest_now(i) == slot.digest)
      slot.digest = 0;
    slot.sample = sample_of(i);
  }
}

void WrittenValues::note(int64_t i, bool differs) {
  if (!watches(i) || (full_.emptied() && !differs)) return;
  Watched& slot = slots_[i];
  const int64_t version = version_of(slot);
  if (!differs && version == slot.version && sample_of(i) == slot.sample) return;
  slot.version = version;
  slot.sample = sample_of(i);
  slot.digest = digest_now(i);
}

void WrittenValues::accept(int64_t i) {
  if (!watches(i)) return;
  Watched& slot = slots_[i];
  slot.version = version_of(slot);
  slot.sample = sample_of(i);
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
