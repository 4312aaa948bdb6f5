#include "published_gradients.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "check.h"

namespace zero_ext {
namespace {

// Changes with every in-place write by a torch op. A write through a tensor subclass counts on the
// subclass alone, one through its local tensor on that alone.
int64_t version_of(const at::Tensor& view, const at::Tensor& local) {
  return (view.is_inference() ? 0 : view._version()) +
         (local.is_inference() ? 0 : local._version());
}

}  // namespace

PublishedGradients::~PublishedGradients() {
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    if (entries_[i].shown && parameter.grad().is_same(entries_[i].view)) {
      parameter.mutable_grad().reset();
    }
  }
}

void PublishedGradients::set_view(int64_t i, const at::Tensor& view, const at::Tensor& local) {
  entries_[i].view = view;
  entries_[i].local = local;
  entries_[i].version = version_of(view, local);
}

void PublishedGradients::take_over(const std::vector<int64_t>& indices, const char* verb) {
  for (const int64_t i : indices) {
    const ShardedParameter& parameter = parameters_[i];
    if (!parameter.managed()) continue;
    Entry& entry = entries_[i];
    const at::Tensor& grad = parameter.tensor.grad();
    const int64_t version = version_of(entry.view, entry.local);
    if (entry.shown && version != entry.version) {
      parameters_.sums_of(i).suspect_nonfinite(parameter.slot);
    }
    entry.version = version;
    if (entry.shown && !grad.defined()) {
      clear(i);
    } else if (grad.defined() && !(entry.shown && grad.is_same(entry.view))) {
      TORCH_CHECK(grad.sizes() == parameter.tensor.sizes(),
                  where(rank_, parameters_.unit(parameter.unit).name()), verb,
                  ": .grad of parameter '", parameter.name, "' was set to a tensor of shape ",
                  grad.sizes(), ", the parameter has ", parameter.tensor.sizes(), ".");
      write(i, grad);
    }
  }
}

bool PublishedGradients::has_foreign() const {
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& parameter = parameters_[i];
    if (parameter.managed() && !entries_[i].shown && parameter.tensor.grad().defined()) return true;
  }
  return false;
}

void PublishedGradients::withdraw() {
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    if (std::exchange(entries_[i].shown, false)) parameters_[i].tensor.mutable_grad().reset();
  }
}

void PublishedGradients::publish() {
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    const ShardedParameter& parameter = parameters_[i];
    if (parameter.managed() && !parameters_.sums_of(i).fresh(parameter.slot)) show(i);
  }
}

void PublishedGradients::show(int64_t i) {
  parameters_[i].tensor.mutable_grad() = entries_[i].view;
  entries_[i].shown = true;
}

void PublishedGradients::write(int64_t i, const at::Tensor& grad) {
  const at::NoGradGuard no_grad;
  const ShardedParameter& parameter = parameters_[i];
  Unit& unit = parameters_.unit(parameter.unit);
  if (grad.unsafeGetTensorImpl()->is_python_dispatch()) {
    TORCH_CHECK(local_reader_, "zero_ext: no reader for tensor subclasses is set");
    unit.sums().write(parameter.slot, local_reader_(grad));
  } else {
    unit.sums().write(parameter.slot, unit.layout().own_part(parameter.slot, grad, at::kFloat));
  }
  show(i);
}

void PublishedGradients::clear(int64_t i) {
  ShardedParameter& parameter = parameters_[i];
  Unit& unit = parameters_.unit(parameter.unit);
  unit.sums().clear(parameter.slot);
  if (std::exchange(entries_[i].shown, false)) parameter.tensor.mutable_grad().reset();
  parameter.nonfinite_micro_batch = -1;
  if (flags_ != nullptr) flags_->clear(unit.flag(parameter.slot));
}

}  // namespace zero_ext
