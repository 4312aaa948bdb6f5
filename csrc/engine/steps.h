// Steps: from the first micro-batch of a step to its update: where gradients are reduced and what
// they are divided by, what the ranks agree on, clipping, the update, zeroing.
//
// Owner:     Engine.
// Threads:   public methods take the lock. Exceptions: getters, and add_stepper() and
//            remove_stepper(), which take steppers_mutex_ alone.
// Invariant: a verb that raises leaves parameters, sums and states as they were.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine_parts.h"
#include "engine/rejections.h"
#include "engine/running_backward.h"
#include "engine/serving.h"
#include "engine/step_update.h"

namespace zero_ext {

enum class ZeroGrad { to_none, to_zero };

class Steps : Facet {
 public:
  Steps(EngineParts& parts, RunningBackward& backward)
      : Facet(parts),
        parts_(parts),
        backward_(backward),
        serving_(parts, backward),
        rejections_(parts) {}

  // Which backwards reduce, see Boundary.
  void push_no_sync();
  void pop_no_sync();
  double divide_factor() const { return boundary_.divide_factor(); }
  void set_divide_factor(double factor);
  int64_t unreduced() const { return boundary_.unreduced(); }
  // Losses are multiplied by `scale` from now on; every rank sets the same. See Note [Loss scale]
  // in boundary.h.
  void set_loss_scale(double scale);
  double gradient_divisor() const { return boundary_.divisor(); }

  // All ranks have come that shard the parameters `unfrozen` next. Raises on every rank where they
  // shard different ones. Collective.
  void meet_for_unfreezing(const std::vector<int64_t>& unfrozen);
  // A step is prepared, then updated unless the verdict forbids it. Where parameters were unfrozen,
  // or settings differ between ranks, nothing is prepared. `last_backward`: as of the last step of
  // these parameters; set.
  StepVerdict prepare(const std::vector<int64_t>& indices, const StepQuestions& questions,
                      int64_t* last_backward);
  StepUpdate begin_update(const std::vector<int64_t>& indices) {
    return {parts_, backward_, indices, counts_};
  }
  // Waits for what a device knows of a step that was made.
  void settle(StepVerdict& verdict) const;
  // Scales the reduced gradients so that their 2-norm over all ranks is at most `max_norm`. Returns
  // the norm before, fp32 [], on the device; the same bits for any number of ranks.
  // `last_backward`: as of the last step of these parameters; kUnknown: they are of several
  // optimizers.
  at::Tensor clip(const std::vector<int64_t>& indices, double max_norm, int64_t last_backward);
  static constexpr int64_t kUnknown = -1;
  // Before torch clips. While this rank waits for all ranks, it serves their backwards. Raises where
  // a step would raise because not all gradients are reduced. Collective.
  void meet_for_clipping(Comm::Agreement about, const std::vector<int64_t>& indices);

  // Before torch unscales, and clips what every rank has whole. Raises where a step would raise because not all gradients are
  // reduced.
  void check_reduced(const std::string& verb) {
    const Access access(lock_);
    check_complete(verb.c_str());
    finished_.note_clipping();
  }
  void zero_grad(const std::vector<int64_t>& indices, ZeroGrad mode);
  // An optimizer steps parameter i from now on, or no longer does.
  void add_stepper(int64_t i);
  void remove_stepper(int64_t i);

  const UpdateCounts& counts() const { return counts_; }
  const std::map<int64_t, Serving::Served>& served() const { return serving_.served(); }

 private:
  // Raises where gradients of backwards are still to come, or were not reduced.
  void check_complete(const char* verb) const;
  // Of the digests in Note [Written values]; equal on all ranks unless users wrote other values.
  int64_t written_values(bool of_subset = false);
  // The same of all ranks.
  void check_complete(const char* verb, const StepVerdict& verdict) const;
  // `rank`: one that did so, or -1.
  void reject_other_meshes(const char* verb, const StepVerdict& verdict) const;
  void reject_changed_too_early(const char* verb, int64_t rank) const;
  MicroBatches boundary_progress() const;
  // Whether the ranks must agree before a step.
  bool must_ask(const StepQuestions& questions) const;
  // While this rank asks, it serves the backwards of other ranks. See Note [Serving] in serving.h.
  bool serves(const StepQuestions& questions) const;
  // Before it asks. `idle`: it had no backward.
  void come_to_step(const Access& access, Comm::Agreement about, bool serves, bool idle,
                    int64_t values = 0);
  // On a device: the hosts of the ranks meet before the devices agree.
  bool hosts_meet() const;
  // This rank had no backward for a step of these parameters.
  bool had_no_backward(const std::vector<int64_t>& indices, int64_t last_backward) const;
  // See Note [Reduction order] in reductions.h. Collective; between hosts it waits for a
  // device, once.
  void learn_reduction_order(const Access& access);
  // Masters take what users wrote to the parameters, and gradients are scaled by the verdict's
  // factor.
  void prepare_foreign_update(const std::vector<int64_t>& indices, StepVerdict* verdict);
  void scale_gradients(const std::vector<int64_t>& indices, const StepVerdict& verdict);
  void zero_one(int64_t i, ZeroGrad mode);
  enum class Whose { every, stepped };  // parameters: all, or those that an optimizer steps
  bool zeroed_all(Whose whose) const;

  EngineParts& parts_;
  RunningBackward& backward_;
  Serving serving_;
  Rejections rejections_;

  UpdateCounts counts_;
  int64_t stepped_ = 0;  // the last backward that a step was made after, of any optimizer
  // [parameters]: whose gradients were zeroed since the last attempt at a backward.
  std::vector<uint8_t> zeroed_;
  int64_t zeroed_after_ = 0;  // that attempt

  // How many optimizers step each parameter: one or none. A thread that holds the GIL may delete an
  // optimizer, while the thread with the engine's lock waits for the GIL. Hence this lock of its
  // own, under which nothing is waited for.
  mutable std::mutex steppers_mutex_;
  std::vector<int32_t> steppers_;
};

}  // namespace zero_ext
