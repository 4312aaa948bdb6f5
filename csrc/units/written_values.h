// WrittenValues: digests that tell whether users wrote the same values to a unit's parameters on
// every rank, since the ranks last agreed on a step.
//
// Owner:     UnitParameters.
// Threads:   called only under the engine's lock.
// Invariant: at a step, a slot without a digest holds what the ranks agreed on; on a device, as far
//            as its version tells.
//
// Note [Written values]
// Each rank keeps a part of a parameter. Where ranks write different values, the next gather makes
// a mixture of them. So each step compares digests, in its own message.
// - Parameters that stay in host memory are the same on every rank, unless users write to them. So
//   a step compares digests of all of their elements, which it reads at the speed of the memory.
// - Parameters that come and go are digested before they are released, because only a part of what
//   was written is left then. A write by torch's operators changes the version of the parameter,
//   one through `.data` does not. So on the host a sum of all elements is compared, too, with that
//   of the time after the gather. On a device the version alone tells.
// - Where the digests of ranks differ, some rank may have written what the parameter held. So the
//   ranks compare what all of them hold now before they raise (Rejections::reject_values).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "memory/flat_buffer.h"
#include "memory/rank_layout.h"
#include "units/unit_context.h"

namespace zero_ext {

class WrittenValues {
 public:
  // `full`: the memory of the parameters, which outlives this. `stay`: they are always there.
  WrittenValues(const UnitContext& context, const RankLayout& layout, const FlatBuffer& full,
                bool stay)
      : context_(context), layout_(layout), full_(full), stay_(stay) {}

  // `parameter` has slot i from now on, and `local` its values; undefined: it moved to another unit.
  void watch(int64_t i, const at::Tensor& parameter, const at::Tensor& local);
  // The parameters have been gathered.
  void take_sums();
  // Takes notice of what was written to slot i, where it is in memory. `differs`: it is known to
  // have changed, or lies elsewhere.
  void note(int64_t i, bool differs = false);
  // The same of all slots.
  void note_all(const std::function<bool(int64_t i)>& differs = {});
  // What slot i holds is the same on every rank, or what was written to it is forgotten.
  void accept(int64_t i);
  void accept_all();
  // The ranks agree on what was written to any slot.
  void accept_written() {
    for (Watched& slot : slots_) slot.digest = 0;
  }
  // Of what slot i holds, if it stays in host memory, else of what was written to it; 0: nothing.
  int64_t digest(int64_t i) const { return watches(i) ? slots_[i].digest : 0; }
  // Of what slot i holds, which is in memory; never 0.
  int64_t digest_now(int64_t i) const;
  // The same of `flat`: slot i in its memory order.
  static int64_t digest_of(const at::Tensor& flat);

 private:
  struct Watched {
    at::Tensor parameter;
    at::Tensor local;  // the parameter itself, unless that is a DTensor
    int64_t version = 0;
    int64_t sum = 0;  // 0: unknown, because it was released when it changed
    int64_t digest = 0;
  };
  bool watches(int64_t i) const { return i < std::ssize(slots_) && slots_[i].parameter.defined(); }
  static int64_t version_of(const Watched& slot);
  bool compares() const { return context_.world > 1 && context_.compute.on_host(); }
  int64_t sum_of(int64_t i) const;  // 0: it is not in memory

  const UnitContext& context_;
  const RankLayout& layout_;
  const FlatBuffer& full_;
  const bool stay_;
  std::vector<Watched> slots_;
};

}  // namespace zero_ext
