// ChangedElements: which elements of this rank's part of a unit have changed since a generation
// began. See Note [Marks of changed elements] in kernels/changes.h.
//
// Owner:     one Unit.
// Threads:   called only under the engine's lock.
// Invariant: an element that no generation since g has marked, and that equals the rounding of its
//            master, has the bits that it had when g began.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "memory/rank_layout.h"
#include "units/unit_context.h"
#include "units/unit_parameters.h"

namespace zero_ext {

class ChangedElements {
 public:
  // `dtype`: of the parameters.
  ChangedElements(const UnitContext& context, const RankLayout& layout,
                  const UnitParameters& parameters, at::ScalarType dtype)
      : context_(context), layout_(layout), parameters_(parameters), dtype_(dtype) {}

  // Whether updates can mark what they change: half-precision parameters on the host.
  bool can_mark() const;
  // From now on changes are marked in this generation. Generations are numbered upwards.
  // `present(i)`: this rank's part of what slot i holds, 1-D.
  void begin(int64_t generation, const std::function<at::Tensor(int64_t i)>& present);
  // Nobody asks for what changed before this one.
  void end_before(int64_t generation);
  // An update begins, whose changes other hosts need. marks() are those of this update until it ends.
  void begin_update();
  void end_update();
  // Where updates mark; null: nobody asks.
  uint16_t* marks() { return generations_.empty() ? nullptr : generations_.back().marks.data(); }
  // To be called before masters and parameters become equal.
  void mark_written();
  // Slot i and its master have become other values.
  void mark_slot(int64_t i);
  // Of this rank's piece of slot i, the elements that may have changed since `generation`, int64 and
  // ascending, as flat indices of the parameter. None: nobody has marked them since then.
  // `present`: as above.
  std::optional<at::Tensor> since(int64_t generation, int64_t i, const at::Tensor& present) const;
  int64_t bytes() const;

 private:
  struct Generation {
    int64_t number;
    std::vector<uint16_t> marks;
    bool of_update = false;
  };
  // Marks what users wrote to slot i; mark `first` is that of its own piece's first element.
  void mark_written_in(int64_t i, const at::Tensor& present, uint16_t* marks, int64_t first) const;

  const UnitContext& context_;
  const RankLayout& layout_;
  const UnitParameters& parameters_;
  const at::ScalarType dtype_;
  std::deque<Generation> generations_;
};

}  // namespace zero_ext
