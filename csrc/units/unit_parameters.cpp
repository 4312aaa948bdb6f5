#include "units/unit_parameters.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>

#include <cstring>
#include <utility>

#include "core/errors.h"

namespace zero_ext {
namespace {

// Of a read. zero_ext/engine/released.py has the errors of other accesses.
constexpr char kReleased[] =
    "the parameters of this unit are released outside of the forwards and backwards of their"
    " modules. Read one with zero_ext.full_tensor(parameter), on every rank.";

}  // namespace

UnitParameters::UnitParameters(const UnitContext& context, const RankLayout& layout,
                               const std::string& name, at::ScalarType dtype, UnitKind kind,
                               int64_t gather_tag, const std::vector<at::Tensor>& values,
                               Comm& comm, bool broadcast)
    : context_(context),
      layout_(layout),
      name_(name),
      dtype_(dtype),
      gather_tag_(gather_tag),
      released_message_(where(context.global_rank, name) + kReleased),
      casts_master_(kind == UnitKind::trainable && context.casts_masters(dtype)),
      on_host_(kind != UnitKind::resident && context.offloads_shard(kind)),
      comes_and_goes_(casts_master_ || on_host_ ||
                      (kind != UnitKind::resident && context.shards_parameters())),
      sends_changes_((!comes_and_goes_ || context.host_copies) && kind != UnitKind::frozen &&
                     dtype != at::kFloat && layout.ranges() > 1 && context.compute.on_host() &&
                     !context.offloads() && comm.crosses_hosts()),
      written_(context, layout, full_, /*stay=*/!comes_and_goes_) {
  const int64_t range = layout_.range_numel();
  if (comes_and_goes_) {
    full_ = FlatBuffer::without_memory(context_.memory, Held::full, context_.compute_place(),
                                       dtype_, layout_.padded_numel(), released_message_);
    if (context_.shows_shards) {
      const int64_t bytes = range * static_cast<int64_t>(c10::elementSize(dtype_));
      shard_ = FlatBuffer::over(context_.memory, Held::shard, dtype_, range,
                                [&] { return comm.peer_memory()->keep(gather_tag_, bytes); });
    } else if (!casts_master_) {
      shard_ =
          FlatBuffer(on_host_ ? context_.offloaded : context_.memory, Held::shard,
                     on_host_ ? context_.host_place() : context_.compute_place(), dtype_, range);
    }
  } else {
    full_ = FlatBuffer(context_.memory, Held::full, context_.compute_place(), dtype_,
                       layout_.padded_numel());
    full_.fill_zero();
  }
  if (kind != UnitKind::frozen) {
    const bool apart = context_.offloads() && !on_host_;
    if (dtype_ != at::kFloat || apart)
      master_ = context_.state_buffer(Held::master, at::kFloat, range);
    if (apart) updated_ = context_.state_buffer(Held::shard, dtype_, range);
  }
  if (context_.host_copies && comes_and_goes_ && comm.crosses_hosts()) {
    copies_ =
        std::make_unique<HostCopies>(context, layout, dtype, gather_tag, sends_changes_, comm);
  }
  take(values, comm, broadcast);
}

void UnitParameters::take(const std::vector<at::Tensor>& values, Comm& comm, bool broadcast) {
  // In their own dtype first, so that fp32 values give exact masters to a bf16 unit.
  const int64_t padded = layout_.padded_numel();
  const int64_t own_begin = layout_.own_begin();
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
    comm.broadcast(source.tensor(), [&] {
      return where(context_.global_rank, name_) + "waited for rank " +
             std::to_string(comm.global_rank(0)) + "'s parameters at wrap time";
    });
  }
  const auto cast = [&](void* target, at::ScalarType dtype, int64_t begin, int64_t numel) {
    check(context_.compute->cast(source.at(begin), dtype_of(source_dtype), target, dtype_of(dtype),
                                 numel, context_.compute.launch()),
          "cast");
  };
  const auto cast_own = [&](const FlatBuffer& target, at::ScalarType dtype) {
    const bool apart = target.device() != context_.compute.device();
    const int64_t range = layout_.range_numel();
    const at::Tensor near = apart ? context_.on_device(range, dtype) : target.tensor();
    cast(near.mutable_data_ptr(), dtype, own_begin, range);
    if (apart) target.tensor().copy_(near);
  };
  if (master_.defined()) cast_own(master_, at::kFloat);
  if (!staged.defined()) return;
  if (shard_.defined()) cast_own(shard_, dtype_);
  if (!comes_and_goes_) cast(full_.data(), dtype_, 0, padded);
  if (copies_ != nullptr && broadcast) {
    copies_->fill([&](void* copy, int64_t range) {
      cast(copy, dtype_, layout_.range_begin(range), layout_.range_numel());
    });
  }
  refresh_mirror(comm);
}

at::Tensor UnitParameters::view(int64_t i) const {
  const Slot& slot = layout_.slot(i);
  return full_.view(slot.offset, slot.spec.sizes, slot.spec.strides);
}

bool UnitParameters::owns_storage_of(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == full_.tensor().storage().unsafeGetStorageImpl();
}

at::Tensor UnitParameters::master_slice(int64_t i) const {
  const bool apart = master_.defined() || shard_.defined();
  if (!master_.defined()) part_changes();
  const FlatBuffer& master = master_.defined() ? master_ : shard_.defined() ? shard_ : full_;
  return layout_.own_slice(master, i, apart ? 0 : layout_.own_begin());
}

at::Tensor UnitParameters::shard_slice(int64_t i) {
  need_shard();
  await_releases();
  part_changes();
  shard_shown_ = true;
  if ((arriving_.defined() || !full_.emptied()) && !lent_before_.defined()) {
    if (own_range_.has_value()) own_range_->block(current_stream(context_.compute.device()));
    if (!arriving_.defined()) {
      std::optional<SideStream::Scope> beside;
      go_beside(beside);
      copy_own_range_to_shard();
    }
    remember_lent_shard();
  }
  return layout_.own_slice(shard_, i);
}

void UnitParameters::remember_lent_shard() {
  await_releases();
  lent_before_ = FlatBuffer(on_host_ ? context_.offloaded : context_.memory, Held::shard,
                            on_host_ ? context_.host_place() : context_.compute_place(), dtype_,
                            layout_.range_numel());
  lent_before_.copy_begin(shard_, shard_.tensor().nbytes());
}

at::Tensor UnitParameters::own_range_with_lent_writes() const {
  const int64_t range = layout_.range_numel();
  const at::Tensor own = full_.slice(layout_.own_begin(), range);
  if (!lent_before_.defined()) return own;
  // Bits are compared, so that NaN equals NaN.
  const at::ScalarType bits = c10::elementSize(dtype_) == 4 ? at::kInt : at::kShort;
  const at::Tensor lent = shard_.typed(bits, range);
  const at::Tensor written = lent.ne(lent_before_.typed(bits, range));
  return at::where(written, lent, own.to(shard_.device()).view(bits)).view(dtype_);
}

void UnitParameters::copy_own_range_to_shard() {
  if (lent_before_.defined()) {
    written_.note_all();
    shard_.tensor().copy_(own_range_with_lent_writes());
    return;
  }
  const void* own = full_.at(layout_.own_begin());
  const size_t bytes = shard_.tensor().nbytes();
  const bool on_host = context_.compute.on_host();
  const bool equal = on_host && std::memcmp(own, shard_.data(), bytes) == 0;
  written_.note_all([&](int64_t i) {
    return on_host && !equal &&
           !layout_.own_slice(full_, i, layout_.own_begin()).equal(layout_.own_slice(shard_, i));
  });
  if (equal) return;
  part_changes();
  copy_bytes(shard_.data(), shard_.device(), own, full_.device(), bytes);
}

at::Tensor UnitParameters::present_slice(int64_t i) const {
  if (lent_before_.defined() && layout_.own_piece(i) != nullptr) {
    const Piece& piece = *layout_.own_piece(i);
    return own_range_with_lent_writes().narrow(0, piece.range_begin, piece.numel);
  }
  if (!full_.emptied()) return layout_.own_slice(full_, i, layout_.own_begin());
  await_releases();
  return shard_.defined() ? layout_.own_slice(shard_, i) : master_slice(i).to(dtype_);
}

void UnitParameters::copy_master(int64_t i, const at::Tensor& written,
                                 const at::Tensor& into) const {
  if (!master_.defined()) {
    into.copy_(written);
    return;
  }
  const at::Device device = context_.state.device();
  const bool fits = into.scalar_type() == at::kFloat && into.device() == device;
  const at::Tensor master = fits ? into : at::empty_like(master_slice(i));
  master.copy_(master_slice(i));
  const at::Tensor there = written.to(device);
  adopt_into_master(there.const_data_ptr(), master.mutable_data_ptr<float>(), master.numel());
  if (!fits) into.copy_(master);
}

void UnitParameters::adopt(int64_t i, const at::Tensor& values) {
  await_releases();
  settle_gather();
  part_changes();
  if (!full_.emptied()) view(i).copy_(values);
  if (!comes_and_goes_ || layout_.own_piece(i) == nullptr) return;
  const at::Tensor part = layout_.own_part(i, values, dtype_).to(context_.compute.device());
  if (shard_.defined()) {
    layout_.own_slice(shard_, i).copy_(part);
  } else {
    adopt_into_master(part.const_data_ptr(), master_slice(i).mutable_data_ptr<float>(),
                      part.numel());
  }
}

void UnitParameters::adopt_writes() {
  begin_update();
  await_update();
  if (stepped() == nullptr) return;
  adopt_into_master(stepped(), master_data(), layout_.range_numel());
}

void UnitParameters::adopt_into_master(const void* parameters, float* master, int64_t numel) const {
  check(context_.state->adopt_writes(parameters, dtype_of(dtype_), master, numel,
                                     context_.state.launch()),
        "adopt_writes");
}

void UnitParameters::cast_master(void* parameters) const {
  check(context_.compute->cast(master_.data(), kernels::DType::f32, parameters, dtype_of(dtype_),
                               layout_.range_numel(), context_.compute.launch()),
        "cast");
}

char* UnitParameters::own_parameters() const {
  if (shard_.defined()) return static_cast<char*>(shard_.data());
  if (comes_and_goes_) return nullptr;
  return static_cast<char*>(full_.at(layout_.own_begin()));
}

void UnitParameters::need_shard() {
  if (!casts_master_ || shard_.defined()) return;
  FlatBuffer shard(context_.memory, Held::shard, context_.compute_place(), dtype_,
                   layout_.range_numel());
  cast_master(shard.data());
  shard_ = std::move(shard);
}

void UnitParameters::drop_idle_shard() {
  if (!casts_master_ || !shard_.defined() || shard_.lent() || master_.emptied()) return;
  adopt_into_master(shard_.data(), master_data(), layout_.range_numel());
  shard_.drop();
}

float* UnitParameters::master_data() const {
  return master_.defined() ? static_cast<float*>(master_.data())
                           : reinterpret_cast<float*>(own_parameters());
}

void* UnitParameters::stepped() const {
  if (!master_.defined()) return nullptr;
  return updated_.defined() ? updated_.data() : own_parameters();
}

void UnitParameters::begin_update() {
  if (!updated_.defined()) return;
  const SideStream::Scope beside(context_.gathering);
  copy_bytes(updated_.data(), updated_.device(), own_parameters(), context_.compute.device(),
             updated_.tensor().nbytes());
  const c10::Stream stream = current_stream(context_.compute.device());
  downloaded_.emplace(stream.device_type());
  downloaded_->record(stream);
}

void UnitParameters::await_releases() const {
  if (on_host_) context_.gathering.synchronize();
}

void UnitParameters::await_update() {
  await_releases();
  if (downloaded_.has_value()) downloaded_->synchronize();
  downloaded_.reset();
}

void UnitParameters::end_update() {
  if (!updated_.defined()) return;
  copy_bytes(own_parameters(), context_.compute.device(), updated_.data(), updated_.device(),
             updated_.tensor().nbytes());
}

void UnitParameters::release(Comm& comm, Writes writes) {
  // A write through `.data` leaves no trace in version counters: only the bytes tell. On a device
  // taking them over is cheaper than waiting for an answer.
  std::optional<SideStream::Scope> beside;
  go_beside(beside);
  if (writes == Writes::discard) written_.accept_all();
  if (writes == Writes::keep) {
    if (shard_.defined()) {
      copy_own_range_to_shard();
    } else {
      written_.note_all();
      adopt_into_master(full_.at(layout_.own_begin()), master_data(), layout_.range_numel());
    }
    refresh_mirror(comm);
  }
  lent_before_.drop();
  full_.empty(*context_.spare, released_message_);
}

void UnitParameters::refresh_mirror(const Comm& comm) {
  if (on_host_) {
    // What the user writes to views that are lent must not be overwritten later.
    shard_shown_ = shard_shown_ && shard_.lent();
    if (comm.staged() || shard_shown_ || !context_.pinned) await_releases();
    return;
  }
  if (!comm.staged() || !comes_and_goes_ || layout_.ranges() == 1) return;
  // After an update nothing may need memory of the device.
  const at::Tensor own = shard_.defined() ? shard_.tensor() : master_.tensor().to(at::kCPU);
  if (!mirror_.defined()) {
    mirror_ = at::empty({layout_.range_numel()}, at::TensorOptions().dtype(dtype_));
  }
  mirror_.copy_(own);
}

void UnitParameters::offload(const std::set<std::string>& states, const std::string& message) {
  const bool full = states.count("full") > 0;
  const bool master = states.count("master") > 0;
  settle_gather();
  if (master && !full) need_shard();
  if (full) {
    full_.offload(context_.offloaded, message);
    if (!context_.shows_shards) shard_.offload(context_.offloaded, message);
  }
  if (master) master_.offload(context_.offloaded, message);
}

void UnitParameters::reload() {
  for (FlatBuffer* buffer : {&full_, &shard_, &master_}) buffer->reload();
  drop_idle_shard();
}

}  // namespace zero_ext
