#include "units/gradient_batch.h"

#include <algorithm>
#include <iterator>

#include "device/kernel_table.h"
#include "memory/storage.h"
#include "units/nan_records.h"

namespace zero_ext {

void GradientBatch::add(int64_t i, const at::Tensor& grad, bool first, float scale) {
  entries_.push_back({.slot = i, .grad = grad, .first = first, .scale = scale});
}

void GradientBatch::add_to(const SumOf& sum_of) {
  in_groups([&](Group group) {
    std::vector<kernels::AccumulateSegment> segments;
    for (const Entry& entry : group) {
      for (const Piece& piece : layout_.pieces(entry.slot)) {
        segments.push_back({.grad = element(entry.grad, piece.slot_begin),
                            .sum = sum_of(entry.slot, piece),
                            .numel = piece.numel,
                            .nonfinite = flag(entry.slot)});
      }
    }
    const KernelTable& table = context_.compute;
    const Entry& like = group.front();
    check(table->accumulate_list(segments.data(), std::ssize(segments),
                                 dtype_of(like.grad.scalar_type()), like.scale, like.first,
                                 /*nonfinite=*/nullptr, table.launch()),
          "accumulate_list");
  });
}

void GradientBatch::copy_into(const at::Tensor& flat) {
  in_groups([&](Group group) {
    std::vector<kernels::CopySegment> segments;
    for (const Entry& entry : group) {
      segments.push_back({.source = entry.grad.const_data_ptr(),
                          .target = mutable_element(flat, layout_.slot(entry.slot).offset),
                          .numel = entry.grad.numel(),
                          .nonfinite = flag(entry.slot)});
    }
    const KernelTable& table = context_.compute;
    const Entry& like = group.front();
    check(table->flatten(segments.data(), std::ssize(segments), dtype_of(like.grad.scalar_type()),
                         dtype_of(flat.scalar_type()),
                         like.first ? kernels::Write::overwrite : kernels::Write::add,
                         /*nonfinite=*/nullptr, table.launch()),
          "flatten");
  });
}

int32_t* GradientBatch::flag(int64_t i) const {
  return context_.nan_records->gradient_flag(first_record_ + i);
}

void GradientBatch::in_groups(const std::function<void(Group)>& launch) {
  auto begin = entries_.begin();
  while (begin != entries_.end()) {
    const auto is_like_first = [&](const Entry& other) {
      return other.grad.scalar_type() == begin->grad.scalar_type() && other.first == begin->first &&
             other.scale == begin->scale;
    };
    const auto end = std::stable_partition(begin + 1, entries_.end(), is_like_first);
    launch({begin, end});
    begin = end;
  }
  entries_.clear();
}

}  // namespace zero_ext
