#include "unit.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "check.h"

namespace zero_ext {
namespace {

constexpr int64_t kAlignmentBytes = 64;
// A flags message: the number of the backward, the unit's index, then one byte per slot.
constexpr int64_t kFlagsHeaderBytes = 2 * sizeof(int64_t);

constexpr char kReleased[] =
    "the parameters of this unit are released: they were read or written outside of a forward or"
    " backward of their own module. Do that inside `with module.summon_full_params():` or after"
    " module.unshard(), or choose units so that the module that reads them is in the same unit.";
constexpr char kDropped[] =
    "the gradients of this unit were dropped by zero_grad(). Clone what should outlive it.";

const void* element(const at::Tensor& flat, int64_t i) {
  return static_cast<const char*>(flat.const_data_ptr()) +
         i * static_cast<int64_t>(flat.element_size());
}

bool any_sum(const std::vector<uint8_t>& fresh) {
  return std::find(fresh.begin(), fresh.end(), 0) != fresh.end();
}

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
      layout_(std::move(specs), ranges_of(context.policy.optimizer, context.world),
              kAlignmentBytes / static_cast<int64_t>(c10::elementSize(dtype))),
      dtype_(dtype),
      gradient_dtype_(dtype),
      own_pieces_(layout_.size(), nullptr),
      gather_tag_(kind == UnitKind::trainable ? index : kMaxUnits + index),
      released_message_(where(context.rank, name_) + kReleased),
      dropped_message_(where(context.rank, name_) + kDropped),
      fresh_(layout_.size(), 1),
      local_fresh_(layout_.size(), 1),
      nonfinite_(layout_.size(), 0),
      held_(layout_.size()) {
  const int64_t range = layout_.range_numel();
  int64_t filled = 0;
  for (int64_t i = 0; i < layout_.size(); ++i) {
    for (const Piece& piece : layout_.pieces(i)) {
      if (piece.range != own_range()) continue;
      own_pieces_[i] = &piece;
      filled += piece.numel;
    }
  }
  own_gaps_ = filled < range;
  casts_master_ = kind == UnitKind::trainable && context_.casts_masters(dtype_);
  comes_and_goes_ = casts_master_ || context_.shards_parameters();
  if (comes_and_goes_) {
    full_ = FlatBuffer::without_memory(context_.memory, Held::full, context_.compute_place(),
                                       dtype_, layout_.padded_numel(), released_message_);
    if (!casts_master_) {
      shard_ = FlatBuffer(context_.memory, Held::shard, context_.compute_place(), dtype_, range);
    }
  } else {
    full_ = FlatBuffer(context_.memory, Held::full, context_.compute_place(), dtype_,
                       layout_.padded_numel());
    full_.fill_zero();
  }
  if (kind == UnitKind::trainable) {
    if (sums_come_and_go()) {
      grad_ =
          FlatBuffer::without_memory(context_.state_memory(), Held::grad, context_.state_place(),
                                     at::kFloat, range, dropped_message_);
    } else {
      grad_ = state_buffer(Held::grad, at::kFloat, range);
      grad_.fill_zero();
    }
    if (dtype_ != at::kFloat || context_.offloads())
      master_ = state_buffer(Held::master, at::kFloat, range);
    if (context_.offloads()) updated_ = state_buffer(Held::shard, dtype_, range);
  }
  take_values(values, comm, broadcast);
}

FlatBuffer Unit::state_buffer(Held held, at::ScalarType dtype, int64_t numel) const {
  return {context_.state_memory(), held, context_.state_place(), dtype, numel};
}

void Unit::take_values(const std::vector<at::Tensor>& values, Comm& comm, bool broadcast) {
  // In their own dtype first, so that fp32 values give exact masters to a bf16 unit.
  const int64_t padded = layout_.padded_numel();
  const int64_t own_begin = layout_.range_begin(own_range());
  const at::ScalarType source_dtype = values.empty() ? dtype_ : values[0].scalar_type();
  FlatBuffer staged;
  if (source_dtype != dtype_ || full_.emptied()) {
    staged =
        FlatBuffer(context_.memory, Held::full, context_.compute_place(), source_dtype, padded);
    staged.fill_zero();
  }
  const FlatBuffer& source = staged.defined() ? staged : full_;
  for (int64_t i = 0; i < layout_.size(); ++i) {
    const Slot& slot = layout_.slot(i);
    source.view(slot.offset, slot.spec.sizes, slot.spec.strides).copy_(values[i]);
  }
  if (broadcast) {
    comm.broadcast(source.tensor(), [this] {
      return where(context_.rank, name_) + "waited for rank 0's parameters at wrap time";
    });
  }
  const auto cast = [&](void* target, at::ScalarType dtype, int64_t begin, int64_t numel) {
    check(context_.compute->cast(source.at(begin), dtype_of(source_dtype), target, dtype_of(dtype),
                                 numel, context_.compute.launch()),
          "cast");
  };
  if (master_.defined()) {
    const int64_t range = layout_.range_numel();
    const bool apart = context_.offloads();
    const at::Tensor near = apart ? on_device(range, at::kFloat) : master_.tensor();
    cast(near.mutable_data_ptr(), at::kFloat, own_begin, range);
    if (apart) master_.tensor().copy_(near);
  }
  if (!staged.defined()) return;
  if (shard_.defined()) cast(shard_.data(), dtype_, own_begin, layout_.range_numel());
  if (!comes_and_goes_) cast(full_.data(), dtype_, 0, padded);
  refresh_mirror(comm);
}

at::Tensor Unit::parameter_view(int64_t i) const {
  const Slot& slot = layout_.slot(i);
  return full_.view(slot.offset, slot.spec.sizes, slot.spec.strides);
}

at::Tensor Unit::own_slice(const FlatBuffer& buffer, int64_t i, int64_t range_begin) const {
  const Piece* piece = own_piece(i);
  return piece == nullptr ? buffer.slice(range_begin, 0)
                          : buffer.slice(range_begin + piece->range_begin, piece->numel);
}

at::Tensor Unit::grad_slice(int64_t i) const { return own_slice(grad_, i); }

at::Tensor Unit::master_slice(int64_t i) const {
  const bool apart = master_.defined() || shard_.defined();
  const FlatBuffer& master = master_.defined() ? master_ : shard_.defined() ? shard_ : full_;
  return own_slice(master, i, apart ? 0 : layout_.range_begin(own_range()));
}

at::Tensor Unit::parameter_slice(int64_t i) {
  need_shard();
  return own_slice(shard_, i);
}

at::Tensor Unit::own_part(int64_t i, const at::Tensor& values, at::ScalarType dtype) const {
  const SlotSpec& spec = layout_.slot(i).spec;
  const Piece* piece = own_piece(i);
  at::Tensor flat = at::empty_strided(spec.sizes, spec.strides,
                                      at::TensorOptions().dtype(dtype).device(values.device()));
  flat.copy_(values);
  flat = flat.as_strided({spec.numel}, {1});
  return piece == nullptr ? flat.narrow(0, 0, 0) : flat.narrow(0, piece->slot_begin, piece->numel);
}

at::Tensor Unit::present_slice(int64_t i) const {
  if (!full_.emptied()) return own_slice(full_, i, layout_.range_begin(own_range()));
  return shard_.defined() ? own_slice(shard_, i) : master_slice(i).to(dtype_);
}

at::Tensor Unit::master_with(int64_t i, const at::Tensor& written) const {
  if (!master_.defined()) return written.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  at::Tensor master = master_slice(i).clone();
  const at::Tensor there = written.to(context_.state.device());
  adopt_into_master(there.const_data_ptr(), master.mutable_data_ptr<float>(), master.numel());
  return master;
}

void Unit::adopt_into_master(const void* parameters, float* master, int64_t numel) const {
  check(context_.state->adopt_writes(parameters, dtype_of(dtype_), master, numel,
                                     context_.state.launch()),
        "adopt_writes");
}

char* Unit::own_parameters() const {
  if (shard_.defined()) return static_cast<char*>(shard_.data());
  if (comes_and_goes_) return nullptr;
  return static_cast<char*>(full_.at(layout_.range_begin(own_range())));
}

void Unit::need_shard() {
  if (!casts_master_ || shard_.defined()) return;
  FlatBuffer shard(context_.memory, Held::shard, context_.compute_place(), dtype_,
                   layout_.range_numel());
  cast_master(shard.data());
  shard_ = std::move(shard);
}

void Unit::drop_idle_shard() {
  if (!casts_master_ || !shard_.defined() || shard_.lent() || master_.emptied()) return;
  adopt_into_master(shard_.data(), master_data(), layout_.range_numel());
  shard_.drop();
}

void Unit::cast_master(void* parameters) const {
  check(context_.compute->cast(master_.data(), kernels::DType::f32, parameters, dtype_of(dtype_),
                               layout_.range_numel(), context_.compute.launch()),
        "cast");
}

float* Unit::master_data() const {
  return master_.defined() ? static_cast<float*>(master_.data())
                           : reinterpret_cast<float*>(own_parameters());
}

void* Unit::stepped_parameter() const {
  if (!master_.defined()) return nullptr;
  return updated_.defined() ? updated_.data() : own_parameters();
}

at::Tensor Unit::on_device(int64_t numel, at::ScalarType dtype) const {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).device(context_.compute.device()));
}

bool Unit::holds_storage_of(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == full_.tensor().storage().unsafeGetStorageImpl();
}

// One backward

void Unit::begin_backward(Sink sink, bool reduces, const std::vector<uint8_t>& expected) {
  sink_ = sink;
  reduces_ = reduces;
  filled_on_.reset();
  reduced_ = false;
  added_ = false;
  expected_ = expected;
  missing_ = std::count(expected.begin(), expected.end(), 1);
  arrived_.assign(layout_.size(), kNotArrived);
  nonfinite_arrived_.clear();
  fresh_before_ = fresh_;
  local_fresh_before_ = local_fresh_;
  if (!any_sum(fresh_)) kept_ = false;  // zeroed since
  if (sink_ == Sink::direct) keep_reduced_sum();
  if (sink_ == Sink::local) {
    keep_reduced_sum();  // it lives where this rank's local sum is about to begin
    need_sums();
    grad_.grow(layout_.padded_numel());
  }
}

void Unit::need_sums() {
  if (!grad_.emptied() || grad_.stowed()) return;
  grad_.allocate();
  if (own_gaps_) grad_.fill_zero();  // updates read them
}

void Unit::drop_idle_sums() {
  if (!sums_come_and_go() || !grad_.defined() || grad_.emptied()) return;
  if (any_sum(fresh_) || any_sum(local_fresh_)) return;
  grad_.empty(dropped_message_);
  kept_ = false;
  before_.drop();
  local_before_.drop();
}

void Unit::keep_reduced_sum() {
  if (kept_ || !any_sum(fresh_)) return;
  if (!before_.defined()) before_ = state_buffer(Held::grad, at::kFloat, layout_.range_numel());
  before_.copy_begin(grad_, before_.tensor().nbytes());
  kept_ = true;
}

void Unit::restore_reduced_sum() {
  if (!kept_) return;
  grad_.copy_begin(before_, before_.tensor().nbytes());
  kept_ = false;
}

void Unit::end_backward() {
  missing_ = 0;
  follow_filling_stream();
  flush_batched();
  if (sink_ == Sink::local && !reduces_) {
    // The reduced sum stays below the local one.
    for (int64_t i = 0; i < layout_.size(); ++i) add_held(i);
  } else {
    kept_ = false;
  }
}

void Unit::abort_backward(std::vector<Orphan>& orphans) {
  missing_ = 0;
  batched_.clear();
  for (auto& grads : held_) grads.clear();
  if (sink_ == Sink::local) {
    const bool local_sums = any_sum(local_fresh_before_);
    if (added_ && local_sums) grad_.copy_begin(local_before_, local_before_.tensor().nbytes());
    // Without an earlier local sum, nothing but this backward lies on top of the reduced one.
    if (!local_sums) restore_reduced_sum();
  } else {
    restore_reduced_sum();
  }
  fresh_ = fresh_before_;
  local_fresh_ = local_fresh_before_;
  if (bucket_ != nullptr)
    orphans.push_back({std::move(pending_), std::move(bucket_), std::move(flags_)});
  pending_ = Pending();
  flags_.clear();
  sources_.clear();
  staged_.reset();
}

bool Unit::accumulate(int64_t i, const at::Tensor& grad, float scale) {
  if (arrived_[i] == kNotArrived) {
    arrived_[i] = kArrivedEmpty;
    if (expected_[i]) --missing_;
  }
  if (!grad.defined()) return true;
  if (sink_ == Sink::direct) need_sums();
  const Slot& slot = layout_.slot(i);
  TORCH_CHECK(grad.layout() == at::kStrided && grad.device() == context_.compute.device(),
              where(context_.rank, name_), "the gradient of '", slot.spec.name, "' is ",
              grad.layout(), " on ", grad.device(),
              "; only dense gradients on the parameter's device can be sharded. Use sparse=False, "
              "or pass the parameter in"
              " ignored_params.");
  TORCH_CHECK(grad.numel() == slot.spec.numel, where(context_.rank, name_), "the gradient of '",
              slot.spec.name, "' has ", grad.numel(), " elements, its parameter had ",
              slot.spec.numel,
              " when it was sharded. Shard the model after the last change of parameter shapes.");
  if (slot.spec.numel == 0) {
    arrived_[i] = kArrived;
    if (sink_ == Sink::direct) fresh_[i] = 0;
    if (sink_ == Sink::local) local_fresh_[i] = 0;
    return true;
  }
  at::Tensor dense = grad;
  if (dense.strides() != at::IntArrayRef(slot.spec.strides)) {
    dense = at::empty_strided(slot.spec.sizes, slot.spec.strides, grad.options());
    dense.copy_(grad);
  }
  const kernels::DType dtype = dtype_of(dense.scalar_type());
  const bool overwrite = arrived_[i] != kArrived;
  arrived_[i] = kArrived;
  follow_filling_stream();
  if (batches()) {
    if (!overwrite) flush_batched();  // it may be among them
    const bool first = sink_ == Sink::direct ? fresh_[i] != 0 : overwrite;
    batched_.push_back({.slot = i, .grad = dense, .first = first, .scale = scale});
    if (sink_ == Sink::direct) fresh_[i] = 0;
    if (complete()) flush_batched();
    return true;
  }
  int32_t nonfinite = 0;
  int32_t* flag = arrival_flag(i, &nonfinite);
  switch (sink_) {
    case Sink::direct:
      check(context_.state->accumulate(dense.const_data_ptr(), dtype,
                                       grad_data() + own_piece(i)->range_begin, slot.spec.numel,
                                       scale, fresh_[i] != 0, flag, context_.state.launch()),
            "accumulate");
      fresh_[i] = 0;
      if (nonfinite != 0) nonfinite_[i] = 1;
      break;
    case Sink::local:
      scale_ = scale;
      if (reduces_ || !local_fresh_before_[i]) {
        held_[i].push_back(dense);
      } else {
        accumulate_local(i, dense, flag);
      }
      break;
    case Sink::bucket:
      accumulate_in_bucket(i, dense.const_data_ptr(), dtype,
                           overwrite ? kernels::Write::overwrite : kernels::Write::add, flag);
      break;
  }
  return nonfinite == 0;
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

void Unit::flush_batched() {
  while (!batched_.empty()) {
    const Batched& head = batched_.front();
    const auto is_like_head = [&](const Batched& other) {
      return other.grad.scalar_type() == head.grad.scalar_type() && other.first == head.first &&
             other.scale == head.scale;
    };
    const auto end = std::stable_partition(batched_.begin() + 1, batched_.end(), is_like_head);
    launch_batch(batched_.begin(), end);
    batched_.erase(batched_.begin(), end);
  }
}

void Unit::launch_batch(BatchedIterator begin, BatchedIterator end) {
  const Runner& runner = context_.compute;
  const kernels::DType dtype = dtype_of(begin->grad.scalar_type());
  const int64_t count = end - begin;
  if (sink_ == Sink::direct) {
    std::vector<kernels::AccumulateSegment> segments;
    for (auto at = begin; at != end; ++at) {
      segments.push_back({.grad = at->grad.const_data_ptr(),
                          .sum = grad_data() + own_piece(at->slot)->range_begin,
                          .numel = at->grad.numel(),
                          .nonfinite = arrival_flag(at->slot, nullptr)});
    }
    check(runner->accumulate_list(segments.data(), count, dtype, begin->scale, begin->first,
                                  /*nonfinite=*/nullptr, runner.launch()),
          "accumulate_list");
    return;
  }
  std::vector<kernels::CopySegment> segments;
  for (auto at = begin; at != end; ++at) {
    segments.push_back({.source = at->grad.const_data_ptr(),
                        .target = staged(layout_.slot(at->slot).offset),
                        .numel = at->grad.numel(),
                        .nonfinite = arrival_flag(at->slot, nullptr)});
  }
  const kernels::Write write = begin->first ? kernels::Write::overwrite : kernels::Write::add;
  check(runner->flatten(segments.data(), count, dtype, dtype_of(staged_.scalar_type()), write,
                        /*nonfinite=*/nullptr, runner.launch()),
        "flatten");
}

void Unit::accumulate_local(int64_t i, const at::Tensor& grad, int32_t* nonfinite) {
  const kernels::DType dtype = dtype_of(grad.scalar_type());
  for (const Piece& piece : layout_.pieces(i)) {
    // Divided by the number of ranks only when it is reduced: the sum of bf16 values over
    // micro-batches is then exact where fp32 can hold it. `scale_` is 1 but for a changed loss
    // scale.
    check(context_.state->accumulate(element(grad, piece.slot_begin), dtype,
                                     local_sum(piece, piece.slot_begin), piece.numel, scale_,
                                     local_fresh_[i] != 0, nonfinite, context_.state.launch()),
          "accumulate");
  }
  local_fresh_[i] = 0;
}

void Unit::add_held(int64_t i) {
  int32_t nonfinite = 0;
  int32_t* flag = arrival_flag(i, &nonfinite);
  for (const at::Tensor& grad : held_[i]) accumulate_local(i, grad, flag);
  if (nonfinite != 0) nonfinite_arrived_.push_back(i);
  held_[i].clear();
}

void Unit::stage_local(int64_t i) {
  int32_t nonfinite = 0;
  int32_t* flag = arrival_flag(i, &nonfinite);
  const Runner& runner = context_.compute;
  // Chunk by chunk, so that a message in half precision is rounded once, from the fp32 sum. On a
  // device a chunk is a piece.
  constexpr int64_t kHostChunk = 4096;
  alignas(kAlignmentBytes) float on_stack[kHostChunk];
  const kernels::DType message = dtype_of(staged_.scalar_type());
  for (const Piece& piece : layout_.pieces(i)) {
    const int64_t chunk_numel = runner.on_host() ? kHostChunk : std::max<int64_t>(piece.numel, 1);
    const at::Tensor memory = runner.on_host() ? at::Tensor() : on_device(piece.numel, at::kFloat);
    float* chunk = runner.on_host() ? on_stack : memory.mutable_data_ptr<float>();
    for (int64_t at = piece.slot_begin; at < piece.slot_begin + piece.numel; at += chunk_numel) {
      const int64_t numel = std::min(chunk_numel, piece.slot_begin + piece.numel - at);
      bool fresh = local_fresh_[i] != 0;
      if (!fresh) {
        copy_bytes(chunk, runner.device(), local_sum(piece, at), runner.device(),
                   numel * sizeof(float));
      }
      for (const at::Tensor& grad : held_[i]) {
        check(runner->accumulate(element(grad, at), dtype_of(grad.scalar_type()), chunk, numel,
                                 scale_, std::exchange(fresh, false), flag, runner.launch()),
              "accumulate");
      }
      check(runner->cast(chunk, kernels::DType::f32, staged(layout_.slot(i).offset + at), message,
                         numel, runner.launch()),
            "cast");
    }
  }
  clear_gap(i);
  if (nonfinite != 0) nonfinite_arrived_.push_back(i);
  held_[i].clear();
}

void Unit::accumulate_in_bucket(int64_t i, const void* grad, kernels::DType dtype,
                                kernels::Write write, int32_t* nonfinite) {
  const Slot& slot = layout_.slot(i);
  const kernels::CopySegment segment{
      .source = grad, .target = staged(slot.offset), .numel = slot.spec.numel};
  check(context_.compute->flatten(&segment, 1, dtype, dtype_of(staged_.scalar_type()), write,
                                  nonfinite, context_.compute.launch()),
        "flatten");
  clear_gap(i);
}

void Unit::clear_gap(int64_t i) {
  // Runs of slots are summed with the gaps between them, and a gap must not look like a NaN.
  if (!context_.compute.on_host()) return;
  const Slot& slot = layout_.slot(i);
  std::memset(staged(slot.offset + slot.spec.numel), 0,
              (slot.padded_numel - slot.spec.numel) * staged_.element_size());
}

void* Unit::staged(int64_t offset) const {
  return static_cast<char*>(staged_.data_ptr()) +
         offset * static_cast<int64_t>(staged_.element_size());
}

at::ScalarType Unit::message_dtype() const {
  if (context_.reduction == Reduction::collective) return context_.reduce_dtype;
  if (sink_ == Sink::local) return at::kFloat;
  return context_.reduce_in_gradient_dtype ? gradient_dtype_ : context_.reduce_dtype;
}

float* Unit::local_sum(const Piece& piece, int64_t in_slot) const {
  const int64_t distance = (piece.range - own_range() + layout_.ranges()) % layout_.ranges();
  return grad_data() + distance * layout_.range_numel() + piece.range_begin +
         (in_slot - piece.slot_begin);
}

void Unit::lend_bucket(std::unique_ptr<Bucket> bucket) {
  bucket_ = std::move(bucket);
  bucket_->wait_until_unused();
  staged_ = bucket_->gradients(message_dtype(), layout_.padded_numel());
  if (context_.compute.on_host()) return;
  follow_filling_stream();
  staged_.zero_();
}

bool Unit::contributes(int64_t i) const {
  return arrived_[i] == kArrived || (sink_ == Sink::local && !local_fresh_[i]);
}

void Unit::start_reduce(Comm& comm, int64_t backward) {
  reduced_ = true;
  backward_ = backward;
  if (sink_ == Sink::direct) return;
  follow_filling_stream();
  flush_batched();
  need_sums();  // of the stream that computes
  if (sink_ == Sink::local) {
    for (int64_t i = 0; i < layout_.size(); ++i) {
      if (contributes(i)) stage_local(i);
    }
  }
  const SideStream::Scope beside(context_.reducing);
  flags_are_counts_ = context_.reduction == Reduction::collective || comm.on_device();
  if (flags_are_counts_) start_counting(comm);
  if (context_.reduction == Reduction::exchange) {
    start_exchange(comm);
  } else {
    start_collective(comm);
  }
  if (context_.offloads()) send_to_host(comm);
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

void Unit::start_counting(Comm& comm) {
  const auto options = at::TensorOptions().dtype(at::kInt).pinned_memory(comm.on_device());
  at::Tensor counts = at::empty({layout_.size()}, options);
  auto* count = counts.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < layout_.size(); ++i) count[i] = contributes(i) ? 1 : 0;
  if (comm.on_device()) counts = counts.to(context_.compute.device(), /*non_blocking=*/true);
  flags_.assign(1, counts);
  comm.all_reduce_sum(counts, pending_);
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
                                  ? on_device(received_numel, message_dtype())
                                  : bucket_->received(message_dtype(), received_numel);
  std::vector<at::Tensor> sends(world);
  std::vector<at::Tensor> recvs(world);
  sources_.assign(world, at::Tensor());
  int64_t next = 0;
  for (int64_t peer = 0; peer < world; ++peer) {
    if (peer == rank && offloads) ++next;
    if (peer == rank) continue;
    sends[peer] = outgoing(layout_.ranges() == 1 ? 0 : peer);
    recvs[peer] = received.narrow(0, next++ * part, part);
    sources_[peer] = recvs[peer];
  }
  sources_[rank] = outgoing(own_range());
  // Numbered by backward and unit, so that a reduction that a failed backward left behind matches
  // no later one.
  const int64_t tag = backward_ * kMaxUnits + index_;
  if (!flags_are_counts_) exchange_flags(comm, 2 * tag);
  comm.exchange(sends, recvs, 2 * tag + 1, pending_);
}

void Unit::exchange_flags(Comm& comm, int64_t tag) {
  const int64_t world = context_.world;
  const int64_t rank = context_.rank;
  flags_.assign(world, at::Tensor());
  for (at::Tensor& flags : flags_) flags = byte_tensor(kFlagsHeaderBytes + layout_.size());
  auto* mine = flags_[rank].mutable_data_ptr<uint8_t>();
  const int64_t header[2] = {backward_, index_};
  std::memcpy(mine, header, kFlagsHeaderBytes);
  for (int64_t i = 0; i < layout_.size(); ++i) mine[kFlagsHeaderBytes + i] = contributes(i) ? 1 : 0;
  comm.exchange(std::vector<at::Tensor>(world, flags_[rank]), flags_, tag, pending_);
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
                             ? on_device(layout_.range_numel(), message_dtype())
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

void Unit::wait_for_reduction() {
  pending_.wait([this] {
    return where(context_.rank, name_) + "waited for its reduction in backward " +
           std::to_string(backward_);
  });
}

std::unique_ptr<Bucket> Unit::finish_reduce(float scale) {
  if (sink_ == Sink::direct) return nullptr;
  const SideStream::Scope beside(context_.reducing);
  wait_for_reduction();
  if (sent_to_host_.has_value()) sent_to_host_->synchronize();
  sent_to_host_.reset();
  if (flags_are_counts_) {
    bring_counts();
  } else {
    check_flags();
  }
  keep_reduced_sum();
  add_contributions(scale);
  added_ = true;
  flags_.clear();
  sources_.clear();
  staged_.reset();
  bucket_->mark_used();
  return std::move(bucket_);
}

void Unit::bring_counts() {
  at::Tensor& counts = flags_[0];
  if (counts.is_cpu()) return;
  // Where this rank uses every slot, nobody needs to wait for what the device knows.
  bool all = true;
  for (int64_t i = 0; i < layout_.size(); ++i) all = all && contributes(i);
  counts = all ? at::ones({layout_.size()}, at::TensorOptions().dtype(at::kInt)) : counts.cpu();
}

void Unit::check_flags() const {
  for (int64_t peer = 0; peer < context_.world; ++peer) {
    int64_t header[2];
    std::memcpy(header, flags_[peer].const_data_ptr<uint8_t>(), kFlagsHeaderBytes);
    TORCH_CHECK(header[0] == backward_ && header[1] == index_, where(context_.rank, name_),
                "this rank reduces unit ", index_, " of backward ", backward_, ", rank ", peer,
                " sent unit ", header[1], " of backward ", header[0],
                ". Every rank must run the same backwards in the same order.");
  }
}

bool Unit::used_by(int64_t source, int64_t i) const {
  if (flags_are_counts_) return flags_[0].const_data_ptr<int32_t>()[i] > 0;
  return flags_[source].const_data_ptr<uint8_t>()[kFlagsHeaderBytes + i] != 0;
}

void Unit::add_contributions(float scale) {
  const auto sources = static_cast<int64_t>(sources_.size());
  const auto used = [&](int64_t i) {
    for (int64_t source = 0; source < sources; ++source) {
      if (used_by(source, i)) return true;
    }
    return false;
  };
  const auto same = [&](int64_t i, int64_t j) {
    if (fresh_[i] != fresh_[j]) return false;
    for (int64_t source = 0; source < sources; ++source) {
      if (used_by(source, i) != used_by(source, j)) return false;
    }
    return true;
  };
  if (sink_ == Sink::local) uncover_reduced_sum();
  for (const Run& run : runs(used, same)) add_run(run, scale);
  for (int64_t i = 0; i < layout_.size(); ++i) {
    if (used(i)) fresh_[i] = 0;
  }
  std::fill(local_fresh_.begin(), local_fresh_.end(), 1);
}

void Unit::uncover_reduced_sum() {
  if (any_sum(local_fresh_)) {
    if (!local_before_.defined()) {
      local_before_ = state_buffer(Held::grad, at::kFloat, layout_.range_numel());
    }
    local_before_.copy_begin(grad_, local_before_.tensor().nbytes());
  }
  if (kept_) grad_.copy_begin(before_, before_.tensor().nbytes());
}

void Unit::add_run(const Run& run, float scale) {
  const kernels::DType dtype = dtype_of(message_dtype());
  std::vector<const void*> contributions;
  for (size_t source = 0; source < sources_.size(); ++source) {
    if (!used_by(static_cast<int64_t>(source), run.first_slot)) continue;
    contributions.push_back(element(sources_[source], run.begin));
  }
  float* sum = grad_data() + run.begin;
  int32_t nonfinite = 0;
  const Runner& runner = context_.state;
  int32_t* flag = runner.on_host() ? &nonfinite : context_.flags->sum(this->flag(run.first_slot));
  check(runner->accumulate_ranks(contributions.data(), static_cast<int32_t>(contributions.size()),
                                 dtype, sum, run.numel, scale, fresh_[run.first_slot] != 0, flag,
                                 runner.launch()),
        "accumulate_ranks");
  if (nonfinite == 0) return;
  for (int64_t i = run.first_slot; i <= run.last_slot; ++i) {
    if (own_piece(i) != nullptr) nonfinite_[i] = 1;
  }
}

std::vector<Run> Unit::runs(const std::function<bool(int64_t)>& used,
                            const std::function<bool(int64_t, int64_t)>& same) const {
  std::vector<Run> runs;
  for (int64_t i = 0; i < layout_.size(); ++i) {
    const Piece* piece = own_piece(i);
    if (piece == nullptr || !used(i)) continue;
    const int64_t numel = piece->numel + piece->gap_numel;
    if (!runs.empty()) {
      Run& last = runs.back();
      if (last.begin + last.numel == piece->range_begin && same(last.last_slot, i)) {
        last.numel += numel;
        last.last_slot = i;
        continue;
      }
    }
    runs.push_back({.begin = piece->range_begin, .numel = numel, .first_slot = i, .last_slot = i});
  }
  return runs;
}

// The reduced gradient

void Unit::clear_gradient(int64_t i) {
  fresh_[i] = 1;
  local_fresh_[i] = 1;
  nonfinite_[i] = 0;
}

void Unit::write_gradient(int64_t i, const at::Tensor& local) {
  need_sums();
  const Piece* piece = own_piece(i);
  if (piece != nullptr && piece->numel > 0) {
    reduced_sum().slice(piece->range_begin, piece->numel).copy_(local.reshape({-1}));
  }
  fresh_[i] = 0;
  local_fresh_[i] = 1;
  suspect_nonfinite(i);
}

void Unit::zero_gradient(int64_t i) {
  need_sums();
  const Piece* piece = own_piece(i);
  if (piece != nullptr) {
    zero_bytes(static_cast<float*>(reduced_sum().data()) + piece->range_begin,
               context_.state.device(), piece->numel * sizeof(float));
  }
  fresh_[i] = 0;
}

void Unit::add_squares(int64_t i, kernels::SquareSum* sum) const {
  const Piece* piece = own_piece(i);
  if (piece == nullptr) return;
  TORCH_INTERNAL_ASSERT(piece->slot_begin % kernels::kSquareGroupNumel == 0);
  check(context_.state->add_squares(grad_data() + piece->range_begin, piece->numel, sum,
                                    context_.state.launch()),
        "add_squares");
}

bool Unit::still_nonfinite(int64_t i) {
  const Piece* piece = own_piece(i);
  if (!nonfinite_[i] || fresh_[i] || piece == nullptr) return false;
  double sum = 0;  // of squares, which cannot overflow: it is finite if every element is
  sum_squares_of(i, &sum, at::Tensor());
  return !std::isfinite(sum);
}

void Unit::sum_squares_of(int64_t i, double* result, const at::Tensor& scratch) const {
  const Piece* piece = own_piece(i);
  if (piece == nullptr || fresh(i)) return;
  kernels::Launch launch = context_.state.launch();
  if (scratch.defined()) {
    launch.scratch = scratch.mutable_data_ptr();
    launch.scratch_bytes = static_cast<int64_t>(scratch.nbytes());
  }
  check(context_.state->sum_of_squares(grad_data() + piece->range_begin, piece->numel, result,
                                       launch),
        "sum_of_squares");
}

// Parameters

void Unit::adopt_parameter(int64_t i, const at::Tensor& values) {
  if (!full_.emptied()) parameter_view(i).copy_(values);
  if (!comes_and_goes_ || own_piece(i) == nullptr) return;
  const at::Tensor part = own_part(i, values, dtype_).to(context_.compute.device());
  if (shard_.defined()) {
    own_slice(shard_, i).copy_(part);
  } else {
    adopt_into_master(part.const_data_ptr(), master_slice(i).mutable_data_ptr<float>(),
                      part.numel());
  }
}

void Unit::adopt_writes() {
  if (stepped_parameter() == nullptr) return;
  begin_update();
  await_update();
  adopt_into_master(stepped_parameter(), master_data(), layout_.range_numel());
}

void Unit::begin_update() {
  if (!updated_.defined()) return;
  const SideStream::Scope beside(context_.gathering);
  copy_bytes(updated_.data(), updated_.device(), own_parameters(), context_.compute.device(),
             updated_.tensor().nbytes());
  const c10::Stream stream = current_stream(context_.compute.device());
  downloaded_.emplace(stream.device_type());
  downloaded_->record(stream);
}

void Unit::await_update() {
  if (downloaded_.has_value()) downloaded_->synchronize();
  downloaded_.reset();
}

void Unit::end_update() {
  if (!updated_.defined()) return;
  copy_bytes(own_parameters(), context_.compute.device(), updated_.data(), updated_.device(),
             updated_.tensor().nbytes());
}

void Unit::gather(Comm& comm, int64_t tag, Pending& pending) {
  if (layout_.ranges() > 1) comm.gather(full_.tensor(), tag, pending);
}

Comm::Offer Unit::offer(Comm& comm, int64_t peer) const {
  const at::Tensor& part = mirror_.defined() ? mirror_ : shard_.tensor();
  return comm.has_only_neighbors() ? comm.offer_lastingly(part, peer, gather_tag_)
                                   : comm.offer(part, peer, gather_tag_);
}

void Unit::refresh_mirror(const Comm& comm) {
  if (!comm.staged() || !comes_and_goes_) return;
  // After an update nothing may need memory of the device.
  const at::Tensor own = shard_.defined() ? shard_.tensor() : master_.tensor().to(at::kCPU);
  if (!mirror_.defined()) {
    mirror_ = at::empty({layout_.range_numel()}, at::TensorOptions().dtype(dtype_));
  }
  mirror_.copy_(own);
}

void Unit::start_gather(Comm& comm) {
  drop_idle_shard();
  full_.allocate(*context_.spare);
  try {
    receive_ranges(comm);
  } catch (...) {
    gathering_ = Pending();
    context_.gathering.join();  // which may be writing to it
    full_.empty(*context_.spare, released_message_);
    throw;
  }
}

void Unit::receive_ranges(Comm& comm) {
  const SideStream::Scope beside(context_.gathering);
  const int64_t part = layout_.range_numel();
  if (comm.on_device()) {
    bring_own_range();
    comm.gather(full_.tensor(), gather_tag_, gathering_);
    return;
  }
  for (int64_t step = 1; step < context_.world; ++step) {
    const int64_t peer = (context_.rank + context_.world - step) % context_.world;
    comm.receive(full_.slice(layout_.range_begin(peer), part), peer, gather_tag_, gathering_);
  }
  bring_own_range();
}

void Unit::bring_own_range() {
  void* own = full_.at(layout_.range_begin(own_range()));
  if (shard_.defined()) {
    copy_bytes(own, full_.device(), shard_.data(), shard_.device(), shard_.tensor().nbytes());
  } else {
    cast_master(own);
  }
}

void Unit::finish_gather(const std::function<std::string()>& what) {
  gathering_.wait(what);
  context_.gathering.join();  // its own range was copied there
}

void Unit::release(Comm& comm, Writes writes) {
  // A write through `.data` leaves no trace in version counters: only the bytes tell. On a device
  // taking them over is cheaper than waiting for an answer.
  if (writes == Writes::keep) {
    const void* own = full_.at(layout_.range_begin(own_range()));
    if (shard_.defined()) {
      const size_t bytes = shard_.tensor().nbytes();
      const bool equal = context_.compute.on_host() && std::memcmp(own, shard_.data(), bytes) == 0;
      if (!equal) copy_bytes(shard_.data(), shard_.device(), own, full_.device(), bytes);
    } else {
      adopt_into_master(own, master_data(), layout_.range_numel());
    }
    refresh_mirror(comm);
  }
  full_.empty(*context_.spare, released_message_);
}

void Unit::drop_master() { master_.drop(); }

void Unit::stow(const std::set<std::string>& states) {
  const std::string message =
      where(context_.rank, name_) + "is offloaded. Call zero_ext.reload_states() first.";
  const auto away = [&](const char* state, std::initializer_list<FlatBuffer*> buffers) {
    if (states.count(state) == 0) return;
    for (FlatBuffer* buffer : buffers) buffer->stow(context_.offloaded, message);
  };
  if (states.count("master") > 0 && states.count("full") == 0) need_shard();
  away("full", {&full_, &shard_});
  away("master", {&master_});
  away("grad", {&grad_, &before_, &local_before_});
}

void Unit::unstow() {
  for (FlatBuffer* buffer : {&full_, &shard_, &master_, &grad_, &before_, &local_before_}) {
    buffer->unstow();
  }
  drop_idle_shard();
}

}  // namespace zero_ext
