#include "reduce/published_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/errors.h"
#include "core/torch_internals.h"
#include "kernels/digest.h"
#include "memory/memory.h"

namespace zero_ext {
namespace {

// Changes with every in-place write by a torch op. A write through a tensor subclass counts on the
// subclass alone, one through its local tensor on that alone.
int64_t version_of(const at::Tensor& view, const at::Tensor& local) {
  if (!view.defined()) return 0;
  return (view.is_inference() ? 0 : view._version()) +
         (local.is_inference() ? 0 : local._version());
}

// Of a plain tensor's values; never 0.
int64_t digest_of(const at::Tensor& grad) {
  const at::Tensor here = grad.detach().to(at::kCPU, at::kFloat).contiguous();
  const uint64_t digest =
      kernels::digest(here.const_data_ptr(), static_cast<int64_t>(here.nbytes()));
  return digest == 0 ? 1 : static_cast<int64_t>(digest);
}

}  // namespace

PublishedGradients::~PublishedGradients() {
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    Entry& entry = entries_[i];
    const at::Tensor& parameter = parameters_[i].tensor;
    if (entry.shown && parameter.grad().is_same(entry.view)) parameter.mutable_grad().reset();
    if (!is_kept(i)) continue;
    try {
      give_own_memory(entry);
    } catch (const std::exception&) {  // there is no memory
      forbid_access(*entry.local.storage().unsafeGetStorageImpl(),
                    parameters_.sums_of(i).why_unreadable());
    }
  }
}

void PublishedGradients::make_missing_views() {
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& parameter = parameters_[i];
    if (parameter.managed() && !entries_[i].view.defined()) make_view(i);
  }
}

void PublishedGradients::make_view(int64_t i) {
  TORCH_CHECK(view_maker_, "zero_ext: no maker of views is set");
  const at::Tensor slice = parameters_.grad_slice(i);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), slice.nbytes(),
                             c10::DataPtr(nullptr, slice.device()), /*allocator=*/nullptr,
                             /*resizable=*/false);
  Entry made;
  made.local = over_storage(storage, at::kFloat, 0, {slice.numel()}, {1});
  std::tie(made.view, made.edits) = view_maker_(i, made.local);
  made.holders = holders(storage) - 1;  // here
  made.version = version_of(made.view, made.local);
  if (is_kept(i)) give_own_memory(entries_[i]);
  made.written = entries_[i].written;
  entries_[i] = std::move(made);
  follow_memory(i);
}

void PublishedGradients::follow_memory() {
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].managed()) follow_memory(i);
  }
}

void PublishedGradients::follow_memory(int64_t i) {
  Entry& entry = entries_[i];
  if (!entry.local.defined() || entry.local.numel() == 0) return;
  const GradientSums& sums = parameters_.sums_of(i);
  c10::StorageImpl& storage = *entry.local.storage().unsafeGetStorageImpl();
  if (!sums.readable()) {
    if (std::exchange(entry.memory, nullptr) != nullptr) {
      forbid_access(storage, sums.why_unreadable());
    }
    return;
  }
  void* memory = sums.reduced(parameters_[i].slot);
  if (memory == entry.memory) return;
  give_memory(storage, c10::DataPtr(memory, storage.device()));
  entry.memory = memory;
}

bool PublishedGradients::is_kept(int64_t i) const {
  const Entry& entry = entries_[i];
  return entry.local.defined() &&
         (is_shared(entry.view) || holders(entry.local.storage()) > entry.holders);
}

void PublishedGradients::give_own_memory(Entry& entry) const {
  if (entry.memory == nullptr) return;
  c10::StorageImpl& storage = *entry.local.storage().unsafeGetStorageImpl();
  const c10::Device device = storage.device();
  const c10::OptionalDeviceGuard guard(device);
  c10::DataPtr own = allocate_at({.device = device}, storage.nbytes());
  copy_bytes(own.get(), device, entry.memory, device, storage.nbytes());
  give_memory(storage, std::move(own));
}

void PublishedGradients::adopt_changes(const std::vector<int64_t>& indices, const char* verb) {
  TORCH_CHECK(!keeps_local_, where(rank_), verb,
              " inside local_gradients(), whose end reduces the gradients. Leave it first.");
  for (const int64_t i : indices) {
    const ShardedParameter& parameter = parameters_[i];
    if (!parameter.managed()) continue;
    Entry& entry = entries_[i];
    const at::Tensor& grad = parameter.tensor.grad();
    const int64_t version = version_of(entry.view, entry.local);
    // A write through `.data` changes no version.
    const bool edited = entry.edits != nullptr && world_ > 1 && !is_none(entry.written) &&
                        entry.edits->digest != entry.written;
    if (entry.shown && (edited || version != entry.version)) {
      nan_records_.suspect_sum(parameters_.record_of(i));
      finished_.note_change();
      if (edited) entry.written = entry.edits->digest;
    }
    entry.version = version;
    if (entry.shown && !grad.defined()) {
      clear(i);
      if (world_ > 1) entry.written = none_after(finished_.count());
      continue;
    }
    const bool published = entry.shown && grad.is_same(entry.view);
    const bool data_was_set = published && has_other_memory(entry);
    if (grad.defined() && (!published || data_was_set)) {
      TORCH_CHECK(grad.sizes() == parameter.tensor.sizes(),
                  where(rank_, parameters_.unit(parameter.unit).name()), verb,
                  ": .grad of parameter '", parameter.name, "' was set to a tensor of shape ",
                  grad.sizes(), ", the parameter has ", parameter.tensor.sizes(), ".");
      at::Tensor set = data_was_set ? grad.detach() : grad;
      if (parameter.is_distributed()) set = to_local_(i, set);
      if (data_was_set || is_kept(i)) make_view(i);
      const bool plain = !set.unsafeGetTensorImpl()->is_python_dispatch();
      const auto digest = [&] {
        return plain ? digest_of(set) : local_reader_(set).second->digest;
      };
      const int64_t written = world_ > 1 ? digest() : 0;
      write(i, set);
      set_written(entries_[i], written);
    }
  }
}

int64_t PublishedGradients::digest(const std::vector<int64_t>& indices, bool of_subset) const {
  uint64_t sum = 0;  // in any order: each rank may list the parameters in its own
  for (const int64_t i : indices) {
    if (parameters_[i].is_expert != of_subset || entries_[i].written == 0) continue;
    sum += c10::get_hash(i, entries_[i].written);
  }
  return static_cast<int64_t>(sum);
}

at::Tensor PublishedGradients::written_digests(const std::vector<int64_t>& indices) const {
  at::Tensor digests = at::zeros({std::ssize(entries_)}, at::kLong);
  for (const int64_t i : indices) digests.mutable_data_ptr<int64_t>()[i] = entries_[i].written;
  return digests;
}

void PublishedGradients::forget_nones() {
  for (Entry& entry : entries_) {
    if (is_none(entry.written)) entry.written = 0;
  }
}

void PublishedGradients::accept_written(const std::vector<int64_t>& indices) {
  for (const int64_t i : indices) set_written(entries_[i], 0);
}

bool PublishedGradients::has_other_memory(const Entry& entry) {
  const at::TensorImpl& view = *entry.view.unsafeGetTensorImpl();
  return !view.is_python_dispatch() && view.has_storage() &&
         !entry.view.storage().is_alias_of(entry.local.storage());
}

bool PublishedGradients::has_foreign() const {
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& parameter = parameters_[i];
    if (parameter.managed() && !entries_[i].shown && parameter.tensor.grad().defined()) return true;
  }
  return false;
}

bool PublishedGradients::has_reduced_gradients() const {
  return std::any_of(parameters_.units().begin(), parameters_.units().end(),
                     [](const auto& unit) { return unit->sums().has_reduced(); });
}

void PublishedGradients::withdraw() {
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    if (std::exchange(entries_[i].shown, false)) parameters_[i].tensor.mutable_grad().reset();
  }
}

void PublishedGradients::keep_local(const std::vector<int64_t>& all) {
  adopt_changes(all, "local_gradients()");
  withdraw();
  keeps_local_ = true;
}

std::map<int64_t, at::Tensor> PublishedGradients::take_local() {
  std::map<int64_t, at::Tensor> taken;
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& grad = parameters_[i].tensor.mutable_grad();
    if (parameters_[i].managed() && grad.defined()) taken.emplace(i, std::exchange(grad, {}));
  }
  keeps_local_ = false;
  return taken;
}

void PublishedGradients::publish() {
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& parameter = parameters_[i];
    if (parameter.managed() && !parameters_.sums_of(i).fresh(parameter.slot)) show(i);
  }
}

void PublishedGradients::show(int64_t i) {
  if (!entries_[i].view.defined()) make_view(i);
  follow_memory(i);
  parameters_[i].tensor.mutable_grad() = entries_[i].view;
  entries_[i].shown = true;
}

void PublishedGradients::write(int64_t i, const at::Tensor& grad) {
  const at::NoGradGuard no_grad;
  const ShardedParameter& parameter = parameters_[i];
  Unit& unit = parameters_.trainable_home_of(i);
  if (grad.unsafeGetTensorImpl()->is_python_dispatch()) {
    TORCH_CHECK(local_reader_, "zero_ext: no reader for tensor subclasses is set");
    unit.sums().write(parameter.slot, local_reader_(grad).first);
  } else {
    unit.sums().write(parameter.slot, unit.layout().own_part(parameter.slot, grad, at::kFloat));
  }
  nan_records_.suspect_sum(parameters_.record_of(i));
  show(i);
}

void PublishedGradients::set_written(Entry& entry, int64_t written) {
  entry.written = written;
  if (entry.edits != nullptr) entry.edits->digest = written;
}

void PublishedGradients::clear(int64_t i) {
  if (std::exchange(entries_[i].shown, false)) parameters_[i].tensor.mutable_grad().reset();
  if (is_kept(i)) make_view(i);
  forget(i);
}

void PublishedGradients::forget(int64_t i) {
  ShardedParameter& parameter = parameters_[i];
  Unit& unit = parameters_.unit(parameter.unit);
  unit.sums().clear(parameter.slot);
  set_written(entries_[i], 0);
  if (std::exchange(entries_[i].shown, false)) parameter.tensor.mutable_grad().reset();
  nan_records_.clear(unit.record(parameter.slot));
}

}  // namespace zero_ext
