#include "units/unit.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/errors.h"

namespace zero_ext {
namespace {

constexpr int64_t kAlignmentBytes = 64;
// A flags message: the number of the backward, the unit's index, whether its sender has late
// gradients, then one byte per slot.
constexpr int64_t kFlagsHeaderBytes = 3 * sizeof(int64_t);

at::Tensor byte_tensor(int64_t numel) {
  return at::empty({numel}, at::TensorOptions().dtype(at::kByte));
}

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
  more_to_come_ = false;
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

std::unique_ptr<Bucket> Unit::abort_backward(std::vector<AbandonedReduction>& abandoned) {
  arrivals_.close();
  batched_.clear();
  follow_filling_stream();
  for (auto& grads : held_) grads.clear();
  sums_.abort_backward();
  if (sent_to_host_.has_value()) sent_to_host_->synchronize();  // into memory that goes now
  sent_to_host_.reset();
  if (bucket_ != nullptr) {
    bucket_->mark_used();
    if (arrivals_.reduced())
      abandoned.push_back({std::move(pending_), std::move(bucket_), std::move(flags_)});
  }
  pending_ = Pending();
  flags_.clear();
  sources_.clear();
  staged_.reset();
  return std::move(bucket_);
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
  if (arrivals_.reduced() || joins_local || needs_bucket()) {
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
                                  dtype_of(staged_.scalar_type()), write, nonfinite,
                                  context_.compute.launch()),
        "flatten");
  clear_gap(i);
}

void Unit::clear_gap(int64_t i) {
  // Runs of slots are summed with the gaps between them, and a gap must not look like a NaN.
  const Slot& slot = layout_.slot(i);
  std::memset(staged(slot.offset + slot.spec.numel), 0,
              (slot.padded_numel - slot.spec.numel) * staged_.element_size());
}

void* Unit::staged(int64_t offset) const { return mutable_element(staged_, offset); }

void Unit::lend_bucket(std::unique_ptr<Bucket> bucket) {
  bucket_ = std::move(bucket);
  bucket_->wait_until_unused();
  staged_ = bucket_->gradients(message_dtype(), layout_.padded_numel());
  if (context_.compute.on_host()) {
    if (path_ == GradientPath::bucket) stage_held();
    return;
  }
  follow_filling_stream();
  staged_.zero_();
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
                [this](GradientBatch& batch) { batch.copy_into(staged_); });
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

void Unit::start_reduce(Comm& comm, int64_t backward, bool more_to_come) {
  if (path_ == GradientPath::direct) return;
  arrivals_.start_reduction();
  backward_ = backward;
  more_to_come_ = more_to_come;
  follow_filling_stream();
  flush_batched();
  sums_.need();  // of the stream that computes
  if (path_ == GradientPath::local) {
    stage_local();
  } else {
    stage_held();
  }
  const SideStream::Scope beside(context_.reducing);
  if (context_.reduction == Reduction::exchange) {
    start_exchange(comm);
  } else {
    start_collective(comm);
  }
  if (context_.offloads()) send_to_host(comm);
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
  const kernels::DType message = dtype_of(staged_.scalar_type());
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
  const bool in_place = staged_.scalar_type() == at::kFloat;
  at::Tensor sums = staged_;
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
  check(table->cast(first, kernels::DType::f32, staged(0), dtype_of(staged_.scalar_type()),
                    layout_.padded_numel(), table.launch()),
        "cast");
}

void Unit::start_exchange(Comm& comm) {
  const int64_t world = context_.world;
  const int64_t rank = context_.rank;
  const int64_t part = layout_.range_numel();
  const auto outgoing = [&](int64_t range) { return staged_.narrow(0, range * part, part); };
  // One place per rank where the sums are offloaded: this rank's own part goes there, too.
  const bool offloads = context_.offloads();
  const int64_t received_numel = (offloads ? world : world - 1) * part;
  const at::Tensor received = offloads && comm.on_device()
                                  ? context_.on_device(received_numel, message_dtype())
                                  : bucket_->received(message_dtype(), received_numel);
  std::vector<at::Tensor> sends(world);
  std::vector<at::Tensor> recvs(world);
  sources_.assign(world, at::Tensor());
  int64_t next = 0;
  for (int64_t peer = 0; peer < world; ++peer) {
    if (peer == rank && offloads) ++next;
    if (peer == rank) continue;
    sends[peer] = outgoing(peer % layout_.ranges());
    recvs[peer] = received.narrow(0, next++ * part, part);
    sources_[peer] = recvs[peer];
  }
  sources_[rank] = outgoing(layout_.own_range());
  // Numbered by backward and unit, so that a reduction that a failed backward left behind matches
  // no later one.
  const int64_t tag = backward_ * kMaxUnits + index_;
  if (flags_come_along(context_, comm)) exchange_flags(comm, 2 * tag);
  comm.exchange(sends, recvs, backward_, 2 * tag + 1, pending_);
}

void Unit::exchange_flags(Comm& comm, int64_t tag) {
  const int64_t world = context_.world;
  const int64_t rank = context_.rank;
  flags_.assign(world, at::Tensor());
  for (at::Tensor& flags : flags_) flags = byte_tensor(kFlagsHeaderBytes + layout_.size());
  auto* mine = flags_[rank].mutable_data_ptr<uint8_t>();
  const int64_t header[3] = {backward_, index_, more_to_come_ ? 1 : 0};
  std::memcpy(mine, header, kFlagsHeaderBytes);
  for (int64_t i = 0; i < layout_.size(); ++i) mine[kFlagsHeaderBytes + i] = contributes(i) ? 1 : 0;
  comm.exchange(std::vector<at::Tensor>(world, flags_[rank]), flags_, backward_, tag, pending_);
}

void Unit::start_collective(Comm& comm) {
  if (context_.compute.on_host()) clear_absent();
  if (layout_.ranges() == 1) {
    comm.all_reduce_sum(staged_, pending_);
    sources_.assign(1, staged_);
    return;
  }
  // Not among the received: those may lie on the host, where no device's backend can write.
  const at::Tensor sum = context_.offloads() && comm.on_device()
                             ? context_.on_device(layout_.range_numel(), message_dtype())
                             : bucket_->received(message_dtype(), layout_.range_numel());
  comm.reduce_scatter(staged_, sum, pending_);
  sources_.assign(1, sum);
}

void Unit::clear_absent() {
  const auto bytes = static_cast<int64_t>(staged_.element_size());
  for (int64_t i = 0; i < layout_.size(); ++i) {
    const Slot& slot = layout_.slot(i);
    if (!contributes(i)) std::memset(staged(slot.offset), 0, slot.padded_numel * bytes);
  }
  const int64_t used_end = layout_.size() == 0 ? 0 : layout_.slot(layout_.size() - 1).padded_end();
  std::memset(staged(used_end), 0, (layout_.padded_numel() - used_end) * bytes);
}

void Unit::send_to_host(Comm& comm) {
  // What other ranks send through host memory arrives there; a sum is not there before it is.
  if (comm.on_device() || context_.reduction == Reduction::collective) wait_for_reduction();
  const int64_t part = layout_.range_numel();
  const auto count = static_cast<int64_t>(sources_.size());
  const at::Tensor received = bucket_->received(message_dtype(), count * part);
  for (int64_t k = 0; k < count; ++k) {
    if (sources_[k].is_cpu()) continue;
    const at::Tensor here = received.narrow(0, k * part, part);
    copy_bytes(here.mutable_data_ptr(), here.device(), sources_[k].const_data_ptr(),
               sources_[k].device(), here.nbytes());
    sources_[k] = here;
  }
  const c10::Stream stream = current_stream(context_.compute.device());
  sent_to_host_.emplace(stream.device_type());
  sent_to_host_->record(stream);
}

void Unit::wait_for_reduction() {
  pending_.wait([this] { return waiting(); });
}

std::string Unit::waiting() const {
  return where(context_.global_rank, name_) + "waited for its reduction in backward " +
         std::to_string(backward_);
}

std::unique_ptr<Bucket> Unit::finish_reduce(float scale) {
  if (path_ == GradientPath::direct) return nullptr;
  const SideStream::Scope beside(context_.reducing);
  wait_for_reduction();
  if (sent_to_host_.has_value()) sent_to_host_->synchronize();
  sent_to_host_.reset();
  if (knows_users()) check_flags();
  add_contributions(scale);
  flags_.clear();
  sources_.clear();
  staged_.reset();
  bucket_->mark_used();
  return std::move(bucket_);
}

void Unit::check_flags() {
  for (int64_t peer = 0; peer < context_.world; ++peer) {
    int64_t header[3];
    std::memcpy(header, flags_[peer].const_data_ptr<uint8_t>(), kFlagsHeaderBytes);
    const int64_t name = context_.global_ranks.empty() ? peer : context_.global_ranks[peer];
    TORCH_CHECK(header[0] == backward_ && header[1] == index_, where(context_.global_rank, name_),
                "this rank reduces unit ", index_, " of backward ", backward_, ", rank ", name,
                " sent unit ", header[1], " of backward ", header[0],
                ". Every rank must run the same backwards in the same order.");
    more_to_come_ = more_to_come_ || header[2] != 0;
  }
}

bool Unit::may_be_used_by(int64_t source, int64_t i) const {
  if (!knows_users()) return true;  // who did not use it sent zeros
  return flags_[source].const_data_ptr<uint8_t>()[kFlagsHeaderBytes + i] != 0;
}

void Unit::add_contributions(float scale) {
  const auto sources = static_cast<int64_t>(sources_.size());
  const auto used = [&](int64_t i) {
    for (int64_t source = 0; source < sources; ++source) {
      if (may_be_used_by(source, i)) return true;
    }
    return false;
  };
  const auto same = [&](int64_t i, int64_t j) {
    if (sums_.fresh(i) != sums_.fresh(j)) return false;
    for (int64_t source = 0; source < sources; ++source) {
      if (may_be_used_by(source, i) != may_be_used_by(source, j)) return false;
    }
    return true;
  };
  sums_.begin_adding();
  for (const Run& run : layout_.runs(used, same)) add_run(run, scale);
  sums_.end_adding();
  if (!knows_users()) return;
  for (int64_t i = 0; i < layout_.size(); ++i) {
    if (used(i)) sums_.mark_summed(i);
  }
}

void Unit::take_counts(const int32_t* counts) {
  for (int64_t i = 0; i < layout_.size(); ++i) {
    if (counts[i] > 0) sums_.mark_summed(i);
  }
}

void Unit::add_run(const Run& run, float scale) {
  const kernels::DType dtype = dtype_of(message_dtype());
  std::vector<const void*> contributions;
  for (size_t source = 0; source < sources_.size(); ++source) {
    if (!may_be_used_by(static_cast<int64_t>(source), run.first_slot)) continue;
    contributions.push_back(element(sources_[source], run.begin));
  }
  float* sum = sums_.data() + run.begin;
  int32_t nonfinite = 0;
  const KernelTable& table = context_.state;
  int32_t* flag = table.on_host() ? &nonfinite : context_.flags->sum(this->flag(run.first_slot));
  check(table->accumulate_ranks(contributions.data(), static_cast<int32_t>(contributions.size()),
                                dtype, sum, run.numel, scale, sums_.fresh(run.first_slot), flag,
                                table.launch()),
        "accumulate_ranks");
  if (nonfinite == 0) return;
  for (int64_t i = run.first_slot; i <= run.last_slot; ++i) {
    if (layout_.own_piece(i) != nullptr) sums_.suspect_nonfinite(i);
  }
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
