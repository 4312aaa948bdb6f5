// RunningBackward: the backward that is running, from its first gradient or call to its end or
// failure. What autograd reports arrives here.
//
// Owner:     Engine. Hooks hold it weakly.
// Threads:   hooks run on autograd's threads. Public methods take the lock, except those that take
//            a `const Access&`.
// Invariant: a backward that threw leaves parameters, sums and states as they were before it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_parts.h"
#include "engine/forwards.h"

namespace zero_ext {

class RunningBackward : public BackwardListener {
 public:
  RunningBackward(EngineParts& parts, Forwards& forwards);
  // `self`: this object. Before anything else is called.
  void listen_as(const std::weak_ptr<BackwardListener>& self);
  // The parameters are plain again, although something keeps the engine alive: hooks do nothing.
  void retire();

  // Makes sure that the coming backward is seen, and on the stream of its forward: a cast to
  // another dtype and back replaces autograd's nodes. It is not called where an optimizer alone was
  // sharded; then the stream of a step counts. Returns the unfrozen parameters: the caller shards
  // them and calls again.
  std::vector<int64_t> before_forward();

  // What other facets ask, and do, under the lock.
  bool is_open(const Access&) const { return open(); }
  // Raises inside a backward. `verb`: in the message.
  void check_none(const Access& access, const char* verb) const;
  // The same, also where a backward that runs on this thread has not reached a parameter yet.
  void check_none_on_this_thread(const Access& access, const char* verb) const;
  // Raises where gradients are unknown or states are offloaded.
  void check_usable(const Access& access, const char* verb) const;
  // See Note [Serving] in serving.h.
  void take_part_in_others_backward(const Access& access);
  // The same bit by bit: begins it, starts its next reduction, and ends it after the last one.
  void take_part_in_others_reduction(const Access& access);
  // Such a backward that has not ended is undone.
  void give_up_others_backward(const Access&) noexcept {
    if (open()) undo();
  }
  // A backward threw since the last step.
  bool threw(const Access&) const { return threw_; }
  void forget_failure(const Access&) { threw_ = false; }
  bool sees_forwards(const Access&) const { return sees_forwards_; }
  BackwardWatch& watch(const Access&) const { return *watch_; }

  // Backwards that have begun; and that tried to, including those that failed at once.
  int64_t count() const { return count_; }
  int64_t attempts() const { return attempts_; }
  int64_t reduced_in_no_sync() const { return reduced_in_no_sync_; }

  // BackwardListener
  void before_gradient(int64_t i) override;
  void after_gradient(int64_t i) override;
  void localize_gradient(int64_t i) override;
  void backward_ended() override;
  void inner_backward_ended(int task) override;
  void backward_failed() noexcept override;
  void call_entered(const std::shared_ptr<Call>& call) override;
  void call_left(const std::shared_ptr<Call>& call) override;

 private:
  enum class Gradients { own, of_others };

  bool open() const { return phase_ == BackwardPhase::open; }
  bool may_begin() const { return !open() && !published_.keeps_local(); }
  // From every hook of a parameter or a call.
  void reach();
  // A backward runs on this thread that reaches a parameter, though it may not have yet.
  bool reaches_parameters() const;
  void begin(const Access& access, bool reduces);
  void begin_units(GradientPath path);
  GradientPath choose_path() const;
  void finish(Gradients gradients);
  void begin_others(const Access& access);
  void finish_others();
  // Between the hook before a gradient and this one the backward was undone, or ended.
  void reject_gradient(const Unit& unit, const ShardedParameter& parameter);
  // On a device, see Reductions::complete_for_others.
  void complete_for_others() noexcept;
  void abort();
  // What threw, and the passes of stage 3.
  void undo() noexcept;
  void leave_call(size_t index);
  // Leaves the open calls of a graph task for which `left` holds.
  template <typename Left>
  void leave_calls_of(int task, const Left& left);

  EngineLock& lock_;
  LastUse& last_use_;
  const OffloadedStates& offloaded_;
  Comm& comm_;
  NanRecords& nan_records_;
  const UnitContext& context_;
  ShardedParameters& parameters_;
  PublishedGradients& published_;
  FinishedBackwards& finished_;
  Reductions& reductions_;
  Boundary& boundary_;
  BackwardPhase& phase_;
  Gatherer& gatherer_;
  Forwards& forwards_;
  std::shared_ptr<BackwardWatch> watch_;

  // Between backwards.
  int64_t count_ = 0;
  int64_t attempts_ = 0;
  int64_t reduced_in_no_sync_ = 0;
  bool threw_ = false;      // a backward since the last step
  std::string not_undone_;  // the error that kept a backward from being undone
  bool sees_forwards_ = false;
  bool retired_ = false;

  // One backward.
  int last_task_ = -1;  // the graph task that last entered a call
  struct OpenCall {
    int task;
    std::shared_ptr<Call> call;
  };
  std::vector<OpenCall> open_calls_;
  int64_t begun_units_ = 0;
  bool reduces_ = false;
  bool hidden_ = false;  // more gradients may arrive than the graph shows
  GradientScales scales_;
  bool changed_before_ = false;  // the gradients, before other ranks' backward
};

}  // namespace zero_ext
