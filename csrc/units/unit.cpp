#include "units/unit.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/errors.h"

namespace zero_ext {
namespace {

constexpr int64_t kAlignmentBytes = 64;

}  // namespace

Unit::Unit(const UnitContext& context, int64_t index, int64_t first_flag, std::string name,
           std::vector<SlotSpec> specs, const std::vector<at::Tensor>& values, at::ScalarType dtype,
           UnitKind kind, Comm& comm, bool broadcast)
    : context_(context),
      index_(index),
      first_flag_(first_flag),
      name_(std::move(name)),
      dtype_(dtype),
      gradient_dtype_(dtype),
      layout_(std::move(specs), ranges_of(context.policy.optimizer, context.shards),
              kAlignmentBytes / static_cast<int64_t>(c10::elementSize(dtype)), context.rank),
      sums_(context_, layout_, name_, kind),
      parameters_(context_, layout_, name_, dtype, kind,
                  kind == UnitKind::trainable ? index : kMaxUnits + index, values, comm, broadcast),
      arrivals_(layout_.size()),
      held_(layout_.size()),
      batched_(context_, layout_, first_flag_) {}

// One backward

void Unit::begin_backward(GradientPath path, bool reduces, const std::vector<uint8_t>& expected) {
  path_ = path;
  reduces_ = reduces;
  // Where sums are set aside before the first gradient, which may come on another stream.
  if (!context_.compute.on_host()) filled_on_ = current_stream(context_.compute.device());
  arrivals_.begin(expected);
  nonfinite_arrived_.clear();
  sums_.begin_backward(path);
}

void Unit::flush() {
  arrivals_.close();
  follow_filling_stream();
  flush_batched();
}

void Unit::end_backward(bool remember) {
  if (remember) arrivals_.remember();
  const bool local_goes_on = path_ == GradientPath::local && !reduces_;
  if (local_goes_on) add_held();
  sums_.end_backward(/*keep=*/local_goes_on);
}

void Unit::abort_backward() {
  arrivals_.close();
  batched_.clear();
  follow_filling_stream();
  for (auto& grads : held_) grads.clear();
  sums_.abort_backward();
  message_.reset();
}

// Arriving

bool Unit::accumulate(int64_t i, const at::Tensor& grad, float scale) {
  arrivals_.reach(i);
  if (!grad.defined()) return true;
  if (path_ == GradientPath::direct) sums_.need();
  check_gradient(i, grad);
  const Slot& slot = layout_.slot(i);
  const bool overwrite = arrivals_.fill(i);
  if (slot.spec.numel == 0 && !arrivals_.reduced()) {
    if (path_ == GradientPath::direct) sums_.mark_summed(i);
    if (path_ == GradientPath::local) sums_.mark_local_summed(i);
    return true;
  }
  at::Tensor dense = grad;
  // A negated view's memory has the other sign, and a tensor of zeros has none.
  const bool lazy = grad.is_neg() || grad._is_zerotensor();
  if (lazy || dense.strides() != at::IntArrayRef(slot.spec.strides)) {
    dense = at::empty_strided(slot.spec.sizes, slot.spec.strides, grad.options());
    dense.copy_(grad);
  }
  follow_filling_stream();
  if (path_ == GradientPath::local) scale_ = scale;
  const bool joins_local = path_ == GradientPath::local && (reduces_ || !sums_.local_was_fresh(i));
  if (arrivals_.reduced() || joins_local || holds_for_message()) {
    held_[i].push_back(dense);
    return true;
  }
  if (context_.compute.on_host()) return accumulate_at_once(i, dense, overwrite, scale);
  batch(i, dense, overwrite, scale);
  return true;
}

bool Unit::accumulate_at_once(int64_t i, const at::Tensor& grad, bool overwrite, float scale) {
  int32_t nonfinite = 0;
  switch (path_) {
    case GradientPath::direct:
      accumulate_directly(i, grad, scale, &nonfinite);
      if (nonfinite != 0) sums_.suspect_nonfinite(i);
      break;
    case GradientPath::local:
      accumulate_local(i, grad, &nonfinite);
      break;
    case GradientPath::bucket:
      accumulate_in_bucket(i, grad, overwrite ? kernels::Write::overwrite : kernels::Write::add,
                           &nonfinite);
      break;
  }
  return nonfinite == 0;
}

void Unit::batch(int64_t i, const at::Tensor& grad, bool overwrite, float scale) {
  if (!overwrite) flush_batched();  // it may be among them
  batched_.add(i, grad, path_ == GradientPath::direct ? sums_.fresh(i) : sums_.local_fresh(i),
               scale);
  if (path_ == GradientPath::direct) sums_.mark_summed(i);
  if (path_ == GradientPath::local) sums_.mark_local_summed(i);
  if (arrivals_.complete()) flush_batched();
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

void Unit::accumulate_directly(int64_t i, const at::Tensor& grad, float scale, int32_t* nonfinite) {
  check(context_.state->accumulate(grad.const_data_ptr(), dtype_of(grad.scalar_type()),
                                   sums_.reduced(i), grad.numel(), scale, sums_.fresh(i), nonfinite,
                                   context_.state.launch()),
        "accumulate");
  sums_.mark_summed(i);
}

void Unit::accumulate_local(int64_t i, const at::Tensor& grad, int32_t* nonfinite) {
  const kernels::DType dtype = dtype_of(grad.scalar_type());
  for (const Piece& piece : layout_.pieces(i)) {
    // Divided by the number of ranks only when it is reduced: the sum of bf16 values over
    // micro-batches is then exact where fp32 can hold it. `scale_` is 1 but for a changed loss
    // scale.
    check(context_.state->accumulate(element(grad, piece.slot_begin), dtype,
                                     sums_.local(piece, piece.slot_begin), piece.numel, scale_,
                                     sums_.local_fresh(i), nonfinite, context_.state.launch()),
          "accumulate");
  }
  sums_.mark_local_summed(i);
}

void Unit::add_held() {
  if (!context_.compute.on_host()) return add_held_to(own_sums());
  for (int64_t i = 0; i < layout_.size(); ++i) {
    int32_t nonfinite = 0;
    for (const at::Tensor& grad : held_[i]) accumulate_local(i, grad, &nonfinite);
    if (nonfinite != 0) nonfinite_arrived_.push_back(i);
    held_[i].clear();
  }
}

void Unit::accumulate_in_bucket(int64_t i, const at::Tensor& grad, kernels::Write write,
                                int32_t* nonfinite) {
  const Slot& slot = layout_.slot(i);
  const kernels::CopySegment segment{
      .source = grad.const_data_ptr(), .target = staged(slot.offset), .numel = slot.spec.numel};
  check(context_.compute->flatten(&segment, 1, dtype_of(grad.scalar_type()),
                                  dtype_of(message_.scalar_type()), write, nonfinite,
                                  context_.compute.launch()),
        "flatten");
  clear_gap(i);
}

void Unit::clear_gap(int64_t i) {
  // Runs of slots are summed with the gaps between them, and a gap must not look like a NaN.
  const Slot& slot = layout_.slot(i);
  std::memset(staged(slot.offset + slot.spec.numel), 0,
              (slot.padded_numel - slot.spec.numel) * message_.element_size());
}

void* Unit::staged(int64_t offset) const { return mutable_element(message_, offset); }

void Unit::lend_message(const at::Tensor& message) {
  message_ = message;
  if (context_.compute.on_host()) {
    if (path_ == GradientPath::bucket) stage_held();
    return;
  }
  follow_filling_stream();
  message_.zero_();
}

void Unit::follow_filling_stream() {
  if (context_.compute.on_host()) return;
  const c10::Stream stream = current_stream(context_.compute.device());
  if (filled_on_ == stream) return;
  if (filled_on_.has_value()) {
    // What waits is launched on its own stream, to which its memory belongs.
    const c10::StreamGuard before(*filled_on_);
    flush_batched();
    order(*filled_on_, stream);
  }
  filled_on_ = stream;
}

void Unit::flush_batched() { batched_.add_to(own_sums()); }

GradientBatch::SumOf Unit::own_sums() const {
  return [this](int64_t, const Piece& piece) { return sums_.local(piece, piece.slot_begin); };
}

void Unit::launch_held(const std::function<bool(int64_t)>& first,
                       const std::function<void(GradientBatch&)>& launch) {
  const c10::Stream stream = current_stream(context_.compute.device());
  c10::DeviceAllocator* allocator = c10::getDeviceAllocator(stream.device_type());
  for (size_t k = 0;; ++k) {
    GradientBatch batch(context_, layout_, first_flag_);
    for (int64_t i = 0; i < layout_.size(); ++i) {
      if (held_[i].size() <= k) continue;
      const at::Tensor& grad = held_[i][k];
      // It may be of another stream, which this one follows.
      allocator->recordStream(grad.storage().data_ptr(), stream);
      batch.add(i, grad, k == 0 && first(i), scale_);
    }
    if (batch.empty()) break;
    launch(batch);
  }
  for (auto& grads : held_) grads.clear();
}

void Unit::add_held_to(const GradientBatch::SumOf& sum_of) {
  launch_held([this](int64_t i) { return sums_.local_fresh(i); },
              [&](GradientBatch& batch) { batch.add_to(sum_of); });
}

void Unit::stage_held() {
  if (!context_.compute.on_host()) {
    launch_held([](int64_t) { return true; },
                [this](GradientBatch& batch) { batch.copy_into(message_); });
    return;
  }
  for (int64_t i = 0; i < layout_.size(); ++i) {
    int32_t nonfinite = 0;
    kernels::Write write = kernels::Write::overwrite;
    for (const at::Tensor& grad : held_[i]) {
      accumulate_in_bucket(i, grad, std::exchange(write, kernels::Write::add), &nonfinite);
    }
    if (nonfinite != 0) nonfinite_arrived_.push_back(i);
    held_[i].clear();
  }
}

// Reducing

at::ScalarType Unit::message_dtype() const {
  if (context_.reduction == Reduction::collective) return context_.reduce_dtype;
  if (path_ == GradientPath::local) return at::kFloat;
  return context_.reduce_in_gradient_dtype ? gradient_dtype_ : context_.reduce_dtype;
}

bool Unit::contributes(int64_t i) const {
  return arrivals_.has_gradient(i) || (path_ == GradientPath::local && !sums_.local_fresh(i));
}

void Unit::fill_message() {
  arrivals_.start_reduction();
  follow_filling_stream();
  flush_batched();
  sums_.need();  // of the stream that computes
  if (path_ == GradientPath::local) {
    stage_local();
  } else {
    stage_held();
  }
  if (context_.compute.on_host() && context_.reduction == Reduction::collective) clear_absent();
}

void Unit::stage_local() {
  if (!context_.compute.on_host()) return stage_local_at_once();
  for (int64_t i = 0; i < layout_.size(); ++i) {
    if (contributes(i)) stage_local_slot(i);
  }
}

void Unit::stage_local_slot(int64_t i) {
  int32_t nonfinite = 0;
  const KernelTable& table = context_.compute;
  // Chunk by chunk, so that a message in half precision is rounded once, from the fp32 sum.
  constexpr int64_t kChunk = 4096;
  alignas(kAlignmentBytes) float chunk[kChunk];
  const kernels::DType message = dtype_of(message_.scalar_type());
  for (const Piece& piece : layout_.pieces(i)) {
    for (int64_t at = piece.slot_begin; at < piece.slot_begin + piece.numel; at += kChunk) {
      const int64_t numel = std::min(kChunk, piece.slot_begin + piece.numel - at);
      bool fresh = sums_.local_fresh(i);
      if (!fresh) std::memcpy(chunk, sums_.local(piece, at), numel * sizeof(float));
      for (const at::Tensor& grad : held_[i]) {
        check(table->accumulate(element(grad, at), dtype_of(grad.scalar_type()), chunk, numel,
                                scale_, std::exchange(fresh, false), &nonfinite, table.launch()),
              "accumulate");
      }
      check(table->cast(chunk, kernels::DType::f32, staged(layout_.slot(i).offset + at), message,
                        numel, table.launch()),
            "cast");
    }
  }
  clear_gap(i);
  if (nonfinite != 0) nonfinite_arrived_.push_back(i);
  held_[i].clear();
}

void Unit::stage_local_at_once() {
  const KernelTable& table = context_.compute;
  // A message in half precision is rounded once, from the fp32 sum.
  const bool in_place = message_.scalar_type() == at::kFloat;
  at::Tensor sums = message_;
  if (!in_place) {
    sums = context_.on_device(layout_.padded_numel(), at::kFloat);
    sums.zero_();
  }
  auto* first = sums.mutable_data_ptr<float>();
  const auto sum_of = [&](int64_t i, const Piece& piece) {
    return first + layout_.slot(i).offset + piece.slot_begin;
  };
  std::vector<kernels::CopySegment> copies;
  for (int64_t i = 0; i < layout_.size(); ++i) {
    if (sums_.local_fresh(i)) continue;
    for (const Piece& piece : layout_.pieces(i)) {
      copies.push_back({.source = sums_.local(piece, piece.slot_begin),
                        .target = sum_of(i, piece),
                        .numel = piece.numel});
    }
  }
  check(table->flatten(copies.data(), std::ssize(copies), kernels::DType::f32, kernels::DType::f32,
                       kernels::Write::overwrite, /*nonfinite=*/nullptr, table.launch()),
        "flatten");
  add_held_to(sum_of);
  if (in_place) return;
  check(table->cast(first, kernels::DType::f32, staged(0), dtype_of(message_.scalar_type()),
                    layout_.padded_numel(), table.launch()),
        "cast");
}

void Unit::clear_absent() {
  const auto bytes = static_cast<int64_t>(message_.element_size());
  for (int64_t i = 0; i < layout_.size(); ++i) {
    const Slot& slot = layout_.slot(i);
    if (!contributes(i)) std::memset(staged(slot.offset), 0, slot.padded_numel * bytes);
  }
  const int64_t used_end = layout_.size() == 0 ? 0 : layout_.slot(layout_.size() - 1).padded_end();
  std::memset(staged(used_end), 0, (layout_.padded_numel() - used_end) * bytes);
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
