#include "units/gradient_sums.h"

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "device/kernel_table.h"

namespace zero_ext {
namespace {

constexpr char kDropped[] = "the gradients of this unit were dropped by zero_grad().";

bool any_sum(const std::vector<uint8_t>& fresh) {
  return std::find(fresh.begin(), fresh.end(), 0) != fresh.end();
}

}  // namespace

GradientSums::GradientSums(const UnitContext& context, const RankLayout& layout,
                           const std::string& unit, UnitKind kind)
    : context_(context),
      layout_(layout),
      dropped_message_(where(context.global_rank, unit) + kDropped),
      fresh_(layout.size(), 1),
      local_fresh_(layout.size(), 1) {
  if (kind == UnitKind::frozen) return;
  if (come_and_go()) {
    grad_ = FlatBuffer::without_memory(context_.state_memory(), Held::grad, context_.state_place(),
                                       at::kFloat, layout_.range_numel(), dropped_message_);
  } else {
    grad_ = context_.state_buffer(Held::grad, at::kFloat, layout_.range_numel());
    grad_.fill_zero();
    grad_.discard();
  }
}

float* GradientSums::local(const Piece& piece, int64_t in_slot) const {
  const int64_t distance =
      (piece.range - layout_.own_range() + layout_.ranges()) % layout_.ranges();
  return data() + distance * layout_.range_numel() + piece.range_begin +
         (in_slot - piece.slot_begin);
}

bool GradientSums::has_reduced() const { return any_sum(fresh_); }

bool GradientSums::empty() const { return !any_sum(fresh_) && !any_sum(local_fresh_); }

void GradientSums::need() {
  if (!grad_.emptied() || grad_.offloaded()) return;
  grad_.allocate();
  if (layout_.own_gaps()) grad_.fill_zero();  // updates read them
}

void GradientSums::drop_idle() {
  if (!grad_.defined() || grad_.emptied() || !empty()) return;
  kept_ = false;
  if (!come_and_go()) {
    for (FlatBuffer* buffer : {&grad_, &before_, &local_before_}) buffer->discard();
    return;
  }
  grad_.empty(dropped_message_);
  before_.drop();
  local_before_.drop();
}

void GradientSums::clear(int64_t i) {
  fresh_[i] = 1;
  local_fresh_[i] = 1;
}

void GradientSums::zero(int64_t i) {
  need();
  const Piece* piece = layout_.own_piece(i);
  if (piece != nullptr) {
    zero_bytes(static_cast<float*>(reduced_sum().data()) + piece->range_begin,
               context_.state.device(), piece->numel * sizeof(float));
  }
  fresh_[i] = 0;
}

void GradientSums::write(int64_t i, const at::Tensor& values) {
  need();
  const Piece* piece = layout_.own_piece(i);
  if (piece != nullptr && piece->numel > 0) {
    reduced_sum().slice(piece->range_begin, piece->numel).copy_(values.reshape({-1}));
  }
  fresh_[i] = 0;
  local_fresh_[i] = 1;
}

// One backward

void GradientSums::begin_backward(GradientPath path) {
  path_ = path;
  adding_ = false;
  fresh_before_ = fresh_;
  local_fresh_before_ = local_fresh_;
  if (!any_sum(fresh_)) kept_ = false;  // zeroed since
  if (path == GradientPath::direct) keep_reduced();
  if (path == GradientPath::local) {
    keep_reduced();  // it lives where this rank's local sum is about to begin
    need();
    grad_.grow(layout_.padded_numel());
  }
}

void GradientSums::copy_range(FlatBuffer& copy) const {
  if (!copy.defined()) {
    copy = context_.state_buffer(Held::grad, at::kFloat, layout_.range_numel());
  }
  copy.copy_begin(grad_, copy.tensor().nbytes());
}

void GradientSums::put_back(const FlatBuffer& copy) {
  grad_.copy_begin(copy, copy.tensor().nbytes());
}

void GradientSums::keep_reduced() {
  if (kept_ || !any_sum(fresh_)) return;
  copy_range(before_);
  kept_ = true;
}

void GradientSums::restore_reduced() {
  if (!kept_) return;
  put_back(before_);
  kept_ = false;
}

void GradientSums::begin_adding() {
  if (adding_) return;
  keep_reduced();
  if (path_ == GradientPath::local && any_sum(local_fresh_)) copy_range(local_before_);
  adding_ = true;
  if (path_ == GradientPath::local && kept_) put_back(before_);
}

void GradientSums::end_adding() { std::fill(local_fresh_.begin(), local_fresh_.end(), 1); }

void GradientSums::end_backward(bool keep) {
  if (!keep) kept_ = false;
}

bool GradientSums::abort_backward() {
  if (path_ == GradientPath::local) {
    const bool local_sums = any_sum(local_fresh_before_);
    if (adding_ && local_sums) put_back(local_before_);
    // Without an earlier local sum, nothing but this backward lies on top of the reduced one.
    if (!local_sums) restore_reduced();
  } else {
    restore_reduced();
  }
  fresh_ = fresh_before_;
  local_fresh_ = local_fresh_before_;
  return adding_;
}

void GradientSums::offload(const std::string& message) {
  offloaded_message_ = message;
  for (FlatBuffer* buffer : {&grad_, &before_, &local_before_}) {
    buffer->offload(context_.offloaded, message);
  }
}

void GradientSums::reload() {
  for (FlatBuffer* buffer : {&grad_, &before_, &local_before_}) buffer->reload();
}

}  // namespace zero_ext
