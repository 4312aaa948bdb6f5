#include "units/host_intake.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "device/kernel_table.h"
#include "memory/storage.h"
#include "units/nan_records.h"

namespace zero_ext {

void HostIntake::add(int64_t i, const at::Tensor& grad, bool first, float scale) {
  int32_t nonfinite = 0;
  switch (path_) {
    case GradientPath::direct:
      add_directly(i, grad, scale, &nonfinite);
      if (nonfinite != 0) context_.nan_records->suspect_sum(first_record_ + i);
      break;
    case GradientPath::local:
      add_to_local(i, grad, &nonfinite);
      break;
    case GradientPath::bucket:
      add_to_message(i, grad, first ? kernels::Write::overwrite : kernels::Write::add, &nonfinite);
      break;
  }
  record(i, nonfinite);
}

void HostIntake::record(int64_t i, int32_t nonfinite) {
  if (nonfinite != 0) context_.nan_records->saw_in_gradient(first_record_ + i);
}

void HostIntake::add_directly(int64_t i, const at::Tensor& grad, float scale, int32_t* nonfinite) {
  check(context_.state->accumulate(grad.const_data_ptr(), dtype_of(grad.scalar_type()),
                                   sums_.reduced(i), grad.numel(), scale, sums_.fresh(i), nonfinite,
                                   context_.state.launch()),
        "accumulate");
  sums_.mark_summed(i);
}

void HostIntake::add_to_local(int64_t i, const at::Tensor& grad, int32_t* nonfinite) {
  const kernels::DType dtype = dtype_of(grad.scalar_type());
  for (const Piece& piece : layout_.pieces(i)) {
    // Divided by the number of ranks only when it is reduced: the sum of bf16 values over
    // micro-batches is then exact where fp32 can hold it. `scale_` is 1 unless the loss scale
    // changed.
    check(context_.state->accumulate(element(grad, piece.slot_begin), dtype,
                                     sums_.local(piece, piece.slot_begin), piece.numel, scale_,
                                     sums_.local_fresh(i), nonfinite, context_.state.launch()),
          "accumulate");
  }
  sums_.mark_local_summed(i);
}

void HostIntake::add_held_to_local() {
  for (int64_t i = 0; i < layout_.size(); ++i) {
    int32_t nonfinite = 0;
    for (const at::Tensor& grad : held_[i]) add_to_local(i, grad, &nonfinite);
    record(i, nonfinite);
    held_[i].clear();
  }
}

void HostIntake::message_was_lent() {
  if (path_ == GradientPath::bucket) stage_held();
}

void HostIntake::stage() {
  if (path_ == GradientPath::local) {
    for (int64_t i = 0; i < layout_.size(); ++i) {
      if (contributes(i)) stage_local_slot(i);
    }
  } else {
    stage_held();
  }
  // An exchange says which slots are absent; a collective adds whatever is there.
  if (context_.reduction == Reduction::collective) clear_absent();
}

void HostIntake::stage_held() {
  for (int64_t i = 0; i < layout_.size(); ++i) {
    int32_t nonfinite = 0;
    kernels::Write write = kernels::Write::overwrite;
    for (const at::Tensor& grad : held_[i]) {
      add_to_message(i, grad, std::exchange(write, kernels::Write::add), &nonfinite);
    }
    record(i, nonfinite);
    held_[i].clear();
  }
}

void HostIntake::add_to_message(int64_t i, const at::Tensor& grad, kernels::Write write,
                                int32_t* nonfinite) {
  const Slot& slot = layout_.slot(i);
  const kernels::CopySegment segment{
      .source = grad.const_data_ptr(), .target = in_message(slot.offset), .numel = slot.spec.numel};
  check(context_.compute->flatten(&segment, 1, dtype_of(grad.scalar_type()),
                                  dtype_of(message_.scalar_type()), write, nonfinite,
                                  context_.compute.launch()),
        "flatten");
  clear_gap(i);
}

void HostIntake::stage_local_slot(int64_t i) {
  int32_t nonfinite = 0;
  const KernelTable& table = context_.compute;
  // Chunk by chunk, so that a message in half precision is rounded once, from the fp32 sum.
  constexpr int64_t kChunk = 4096;
  alignas(64) float chunk[kChunk];
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
      check(table->cast(chunk, kernels::DType::f32, in_message(layout_.slot(i).offset + at),
                        message, numel, table.launch()),
            "cast");
    }
  }
  clear_gap(i);
  record(i, nonfinite);
  held_[i].clear();
}

void HostIntake::clear_gap(int64_t i) {
  // Runs of slots are summed with the gaps between them, and a gap must not look like a NaN.
  const Slot& slot = layout_.slot(i);
  std::memset(in_message(slot.offset + slot.spec.numel), 0,
              (slot.padded_numel - slot.spec.numel) * message_.element_size());
}

void HostIntake::clear_absent() {
  const auto bytes = static_cast<int64_t>(message_.element_size());
  for (int64_t i = 0; i < layout_.size(); ++i) {
    const Slot& slot = layout_.slot(i);
    if (!contributes(i)) std::memset(in_message(slot.offset), 0, slot.padded_numel * bytes);
  }
  const int64_t used_end = layout_.size() == 0 ? 0 : layout_.slot(layout_.size() - 1).padded_end();
  std::memset(in_message(used_end), 0, (layout_.padded_numel() - used_end) * bytes);
}

}  // namespace zero_ext
