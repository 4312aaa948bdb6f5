#include "memory/rank_layout.h"

#include <ATen/ops/empty_strided.h>

#include <utility>

namespace zero_ext {

RankLayout::RankLayout(std::vector<SlotSpec> specs, int64_t ranges, int64_t alignment, int64_t rank)
    : Layout(std::move(specs), ranges, alignment), rank_(rank), own_pieces_(size(), nullptr) {
  int64_t filled = 0;
  for (int64_t i = 0; i < size(); ++i) {
    for (const Piece& piece : pieces(i)) {
      if (piece.range != own_range()) continue;
      own_pieces_[i] = &piece;
      filled += piece.numel;
    }
  }
  own_gaps_ = filled < range_numel();
}

at::Tensor RankLayout::own_slice(const FlatBuffer& buffer, int64_t i, int64_t range_begin) const {
  const Piece* piece = own_piece(i);
  return piece == nullptr ? buffer.slice(range_begin, 0)
                          : buffer.slice(range_begin + piece->range_begin, piece->numel);
}

at::Tensor RankLayout::own_part(int64_t i, const at::Tensor& values, at::ScalarType dtype) const {
  const SlotSpec& spec = slot(i).spec;
  const Piece* piece = own_piece(i);
  at::Tensor flat = at::empty_strided(spec.sizes, spec.strides,
                                      at::TensorOptions().dtype(dtype).device(values.device()));
  flat.copy_(values);
  flat = flat.as_strided({spec.numel}, {1});
  return piece == nullptr ? flat.narrow(0, 0, 0) : flat.narrow(0, piece->slot_begin, piece->numel);
}

std::vector<Run> RankLayout::runs(const std::function<bool(int64_t)>& used,
                                  const std::function<bool(int64_t, int64_t)>& same) const {
  std::vector<Run> runs;
  for (int64_t i = 0; i < size(); ++i) {
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

}  // namespace zero_ext
