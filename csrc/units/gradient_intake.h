// GradientIntake: the gradients of a unit on their way into this rank's message or sums. On the
// host each is added at once (HostIntake). On a device they wait for each other, for one launch of
// all (DeviceIntake).
//
// Owner:     one Unit.
// Threads:   called only under the engine's lock.
// Invariant: a gradient that arrives is added, waits for a launch, or is held until the message or
//            the end of the backward takes it. None is lost, and none is added twice.
//
// Note [Where a gradient goes]
//   direct  one rank: straight into the reduced sum, scaled.
//   bucket  several ranks, a backward that reduces and follows no local one: into the unit's
//           message to the other ranks, in the gradient's dtype. Gradients are held until the unit
//           is lent a bucket for the message.
//   local   several ranks, inside no_sync() or after it: into this rank's own fp32 sum of the whole
//           unit. A backward that reduces then makes its message from that sum.
// Every rank takes the same path in the same backward. The path depends on the order of calls
// alone, never on which gradients arrived.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/rank_layout.h"
#include "units/arrivals.h"
#include "units/gradient_sums.h"
#include "units/unit_context.h"

namespace zero_ext {

class GradientIntake {
 public:
  // The one for the place where the parameters are computed. All arguments outlive it.
  // `first_record`: that of slot 0 among the context's NaN records.
  static std::unique_ptr<GradientIntake> create(const UnitContext& context,
                                                const RankLayout& layout, GradientSums& sums,
                                                Arrivals& arrivals, int64_t first_record);
  GradientIntake(const UnitContext& context, const RankLayout& layout, GradientSums& sums,
                 Arrivals& arrivals, int64_t first_record)
      : context_(context),
        layout_(layout),
        sums_(sums),
        arrivals_(arrivals),
        first_record_(first_record),
        held_(layout.size()) {}
  virtual ~GradientIntake() = default;

  void begin_backward(GradientPath path, bool reduces);
  GradientPath path() const { return path_; }
  // Takes a gradient of slot i: dense, strides as the slot's. `first`: the slot's first one in this
  // backward. `scale`: of direct and local sums; a message is scaled when it is reduced.
  void take(int64_t i, const at::Tensor& grad, bool first, float scale);
  // Launches what waits on a device.
  virtual void flush() {}

  // This rank's message: [padded], lent from the first gradient that goes there until the reduction
  // is finished. Gradients that need it are held before.
  bool holds_for_message() const { return !message_.defined() && path_ == GradientPath::bucket; }
  void lend_message(const at::Tensor& message);
  void return_message() { message_.reset(); }
  // The reduction starts: the message becomes all that this rank contributes.
  void fill_message();
  // This rank has something of slot i for the message.
  bool contributes(int64_t i) const {
    return arrivals_.has_gradient(i) || (path_ == GradientPath::local && !sums_.local_fresh(i));
  }

  // The backward cannot be undone any more. Returns whether the local sums go on in the next one.
  bool end_backward();
  // The backward threw: what was held or waited is dropped.
  void abort_backward();

 protected:
  // On a device: the current stream is the first one of the backward; it goes on where the last
  // gradient was put; what waits is forgotten.
  virtual void begin_on_stream() {}
  virtual void follow_stream() {}
  virtual void drop_waiting() {}
  // As take(), of a gradient that is not held.
  virtual void add(int64_t i, const at::Tensor& grad, bool first, float scale) = 0;
  virtual void message_was_lent() = 0;
  // All that is held, and the local sums, into the message.
  virtual void stage() = 0;
  // All that is held into the local sums.
  virtual void add_held_to_local() = 0;

  void* in_message(int64_t offset) const;

  // Constant after construction.
  const UnitContext& context_;
  const RankLayout& layout_;
  GradientSums& sums_;
  Arrivals& arrivals_;
  int64_t first_record_;

  // One backward.
  GradientPath path_ = GradientPath::direct;
  bool reduces_ = false;
  float scale_ = 1;                            // of gradients that are added to a local sum
  at::Tensor message_;                         // undefined while none is lent
  std::vector<std::vector<at::Tensor>> held_;  // [slots]
};

}  // namespace zero_ext
