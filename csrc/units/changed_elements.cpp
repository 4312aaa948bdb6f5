#include "units/changed_elements.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "kernels/changes.h"

namespace zero_ext {
namespace {

// Sets or clears the marks of elements [begin, end).
void set_marks(uint16_t* marks, int64_t begin, int64_t end, bool marked) {
  for (int64_t e = begin; e < end; ++e) {
    const auto bit = static_cast<uint16_t>(1 << kernels::mark_bit(e));
    uint16_t& word = marks[kernels::mark_word(e)];
    word = static_cast<uint16_t>(marked ? word | bit : word & ~bit);
  }
}

}  // namespace

bool ChangedElements::can_mark() const {
  return context_.compute.on_host() && !context_.offloads() && parameters_.stepped() != nullptr &&
         dtype_ != at::kFloat;
}

void ChangedElements::begin(int64_t generation, const std::function<at::Tensor(int64_t)>& present) {
  Generation added{.number = generation, .marks = {}};
  added.marks.resize(kernels::mark_words(layout_.range_numel()));
  for (int64_t i = 0; i < layout_.size(); ++i) {
    const Piece* piece = layout_.own_piece(i);
    if (piece != nullptr) mark_written_in(i, present(i), added.marks.data(), piece->range_begin);
  }
  generations_.push_back(std::move(added));
}

void ChangedElements::begin_update() {
  end_update();  // of one that threw
  Generation added{.number = generations_.empty() ? 0 : generations_.back().number,
                   .marks = {},
                   .of_update = true};
  added.marks.resize(kernels::mark_words(layout_.range_numel()));
  generations_.push_back(std::move(added));
}

void ChangedElements::end_update() {
  if (generations_.empty() || !generations_.back().of_update) return;
  const Generation update = std::move(generations_.back());
  generations_.pop_back();
  if (generations_.empty()) return;
  std::vector<uint16_t>& marks = generations_.back().marks;
  for (size_t w = 0; w < marks.size(); ++w) marks[w] |= update.marks[w];
}

void ChangedElements::end_before(int64_t generation) {
  while (!generations_.empty() && generations_.front().number < generation)
    generations_.pop_front();
}

void ChangedElements::mark_written_in(int64_t i, const at::Tensor& present, uint16_t* marks,
                                      int64_t first) const {
  check(kernels::mark_written(present.const_data_ptr(), dtype_of(dtype_),
                              parameters_.master_slice(i).const_data_ptr<float>(), present.numel(),
                              marks, first, context_.state.launch()),
        "mark_written");
}

void ChangedElements::mark_written() {
  if (marks() == nullptr) return;
  check(kernels::mark_written(parameters_.stepped(), dtype_of(dtype_), parameters_.master_data(),
                              layout_.range_numel(), marks(), 0, context_.state.launch()),
        "mark_written");
}

void ChangedElements::mark_slot(int64_t i) {
  const Piece* piece = layout_.own_piece(i);
  if (marks() == nullptr || piece == nullptr) return;
  set_marks(marks(), piece->range_begin, piece->range_begin + piece->numel, true);
}

std::optional<at::Tensor> ChangedElements::since(int64_t generation, int64_t i,
                                                 const at::Tensor& present) const {
  if (generations_.empty() || generations_.front().number > generation) return std::nullopt;
  const Piece* piece = layout_.own_piece(i);
  if (piece == nullptr) return at::empty({0}, at::kLong);
  // Whole groups, beginning with that of the piece's first element.
  const int64_t begin = piece->range_begin / kernels::kGroupMarks * kernels::kGroupMarks;
  const int64_t first = piece->range_begin - begin;
  const int64_t end = first + piece->numel;
  std::vector<uint16_t> marks(kernels::mark_words(end));
  for (const Generation& each : generations_) {
    if (each.number < generation) continue;
    const uint16_t* const theirs = each.marks.data() + kernels::mark_word(begin);
    for (size_t w = 0; w < marks.size(); ++w) marks[w] |= theirs[w];
  }
  mark_written_in(i, present, marks.data(), first);
  set_marks(marks.data(), 0, first, false);  // of neighbours
  const auto marked =
      static_cast<int64_t>(marks.size()) / kernels::kRowMarks * kernels::kGroupMarks;
  set_marks(marks.data(), end, marked, false);
  const at::Tensor found = at::empty({kernels::count_marks(marks.data(), end)}, at::kLong);
  kernels::list_marks(marks.data(), end, found.mutable_data_ptr<int64_t>());
  return found.add_(piece->slot_begin - first);
}

int64_t ChangedElements::bytes() const {
  int64_t bytes = 0;
  for (const Generation& each : generations_) bytes += std::ssize(each.marks) * 2;
  return bytes;
}

}  // namespace zero_ext
