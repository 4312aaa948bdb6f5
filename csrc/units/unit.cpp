#include "units/unit.h"

#include <ATen/ops/empty_strided.h>

#include <utility>

#include "core/errors.h"
#include "core/range.h"
#include "units/nan_records.h"

namespace zero_ext {
namespace {

constexpr int64_t kAlignmentBytes = 64;

}  // namespace

Unit::Unit(const Ranks& ranks, int64_t index, int64_t first_record, std::string name,
           std::vector<SlotSpec> specs, const std::vector<at::Tensor>& values, at::ScalarType dtype,
           UnitKind kind, bool broadcast)
    : ranks_(ranks),
      context_(ranks.context),
      index_(index),
      first_record_(first_record),
      name_(std::move(name)),
      dtype_(dtype),
      gradient_dtype_(dtype),
      layout_(std::move(specs), ranges_of(context_.policy.optimizer, context_.shards),
              kAlignmentBytes / static_cast<int64_t>(c10::elementSize(dtype)), context_.rank),
      sums_(context_, layout_, name_, kind),
      parameters_(context_, layout_, name_, dtype, kind,
                  kind == UnitKind::frozen ? kMaxUnits + index : index, values, ranks.comm,
                  broadcast),
      changes_(context_, layout_, parameters_, dtype),
      arrivals_(layout_.size()),
      intake_(GradientIntake::create(context_, layout_, sums_, arrivals_, first_record)) {}

at::ScalarType Unit::message_dtype() const {
  if (context_.reduction == Reduction::collective) return context_.reduce_dtype;
  if (intake_->path() == GradientPath::local) return at::kFloat;
  return context_.reduce_in_gradient_dtype ? gradient_dtype_ : context_.reduce_dtype;
}

// One backward

void Unit::begin_backward(GradientPath path, bool reduces, const std::vector<uint8_t>& expected) {
  arrivals_.begin(expected);
  intake_->begin_backward(path, reduces);
  sums_.begin_backward(path);
}

void Unit::flush() {
  arrivals_.close();
  intake_->flush();
}

void Unit::end_backward(bool remember) {
  if (remember) arrivals_.remember();
  const bool local_goes_on = intake_->end_backward();
  sums_.end_backward(/*keep=*/local_goes_on);
}

void Unit::abort_backward() {
  arrivals_.close();
  intake_->abort_backward();
  // A device's flags still tell what was seen in the sums that are gone.
  if (!sums_.abort_backward()) return;
  for (int64_t i = 0; i < layout_.size(); ++i) context_.nan_records->suspect_sum(record(i));
}

void Unit::accumulate(int64_t i, const at::Tensor& grad, float scale) {
  const Range range("accumulate", name_);
  arrivals_.reach(i);
  if (!grad.defined()) return;
  const GradientPath path = intake_->path();
  if (path == GradientPath::direct) sums_.need();
  check_gradient(i, grad);
  const Slot& slot = layout_.slot(i);
  const bool first = arrivals_.fill(i);
  if (slot.spec.numel == 0 && !arrivals_.reduced()) {
    if (path == GradientPath::direct) sums_.mark_summed(i);
    if (path == GradientPath::local) sums_.mark_local_summed(i);
    return;
  }
  // A negated view's memory has the other sign, and a tensor of zeros has none.
  const bool lazy = grad.is_neg() || grad._is_zerotensor();
  if (!lazy && grad.strides() == at::IntArrayRef(slot.spec.strides)) {
    return intake_->take(i, grad, first, scale);
  }
  const at::Tensor dense = at::empty_strided(slot.spec.sizes, slot.spec.strides, grad.options());
  dense.copy_(grad);
  return intake_->take(i, dense, first, scale);
}

void Unit::check_gradient(int64_t i, const at::Tensor& grad) const {
  const SlotSpec& spec = layout_.slot(i).spec;
  TORCH_CHECK(grad.layout() == at::kStrided && grad.device() == context_.compute.device(),
              where(context_.global_rank, name_), "the gradient of '", spec.name, "' is ",
              grad.layout(), " on ", grad.device(),
              "; only dense gradients on the parameter's device can be sharded. Use sparse=False, "
              "or pass the parameter in ignored_params.");
  TORCH_CHECK(grad.numel() == spec.numel, where(context_.global_rank, name_), "the gradient of '",
              spec.name, "' has ", grad.numel(), " elements, its parameter had ", spec.numel,
              " when it was sharded. Shard the model after the last change of parameter shapes.");
  const at::TensorImpl& impl = *grad.unsafeGetTensorImpl();
  const bool has_memory = impl.has_storage() && impl.unsafe_storage().data_ptr().get() != nullptr;
  TORCH_CHECK(
      has_memory || grad._is_zerotensor() || grad.numel() == 0, where(context_.global_rank, name_),
      "the gradient of '", spec.name,
      "' has no memory of its own: it is a fake tensor or a wrapper around others. Run the"
      " backward of a sharded model outside of FakeTensorMode, and turn such a gradient into"
      " a plain tensor in a hook of the parameter.");
}

// Offloading

void Unit::offload(const std::set<std::string>& states) {
  const std::string message =
      where(context_.global_rank, name_) + "is offloaded. Call zero_ext.reload_states() first.";
  parameters_.offload(states, message);
  if (states.count("grad") > 0) sums_.offload(message);
}

void Unit::reload() {
  sums_.reload();
  parameters_.reload();
}

}  // namespace zero_ext
