// Engine: when each verb runs, on the units of one model.
//
// Owner:     the sharded module or its optimizer, through Python.
// Threads:   every public function takes mutex_ and makes our device the current one (Access), and
//            is called without the GIL; hooks come from autograd's threads.
// Invariant: a backward that threw, and a verb that refused, leave parameters, sums and states as
//            they were.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "autograd/backward_listener.h"
#include "autograd/backward_watch.h"
#include "autograd/call.h"
#include "comm/comm.h"
#include "device/device_flags.h"
#include "device/streams.h"
#include "gather/gatherer.h"
#include "reduce/boundary.h"
#include "reduce/published_gradients.h"
#include "reduce/reductions.h"
#include "step/step_agreement.h"
#include "units/finished_backwards.h"
#include "units/sharded_parameters.h"

namespace zero_ext {

struct EngineOptions {
  int stage = 1;
  c10::Device device = c10::kCPU;  // of the parameters
  bool offload = false;            // to the host: what an update needs
  bool pin_memory = true;          // of it
  std::string reduce_group;        // names of process groups; both empty: one rank alone
  std::string gather_group;
  std::vector<int64_t> global_ranks;  // of theirs, see Comm
  std::string within_reduce_group;    // see Comm::Names; empty: all ranks are one replica
  std::string within_gather_group;
  std::string across_group;
  int64_t timeout_ms = 0;  // of messages that no process group carries, and of what is watched
  bool shared_host_transport = true;  // where it can be
  Reduction reduction = Reduction::exchange;
  std::optional<at::ScalarType> reduce_dtype;
  double divide_factor = 0;        // gradients are divided by it; 0: by the number of ranks
  int64_t accumulation_steps = 1;  // every n-th backward is a boundary
  bool broadcast = true;           // rank 0's parameter values are everybody's
  int64_t limit_bytes = std::numeric_limits<int64_t>::max();
  GatherOptions gather;
};

// One update of the parameters `indices`, run by run.
struct Update {
  std::vector<int64_t> indices;
  std::function<bool(int64_t, int64_t)> same;  // two parameters can be updated together
  std::function<void(int64_t unit, Unit&, const Run&, int64_t parameter)> apply;
  std::function<void(int64_t)> applied;  // parameter i was updated, on whichever ranks hold it
};

class Engine : public BackwardListener, public std::enable_shared_from_this<Engine> {
 public:
  // `destroy` deletes it, for a caller who must prepare for that: it waits for gloo's threads.
  static std::shared_ptr<Engine> create(EngineOptions options, void (*destroy)(Engine*));
  ~Engine() override;

  // This rank takes no more from the others. What they may still take lives on after the engine.
  void begin_shutdown() noexcept;

  // Behind the ones that exist; their hooks do nothing until they are in a unit.
  void add_parameters(const std::vector<at::Tensor>& parameters,
                      const std::vector<std::string>& names);
  // Units of parameter indices, in the order in which they will be reduced, behind the ones that
  // exist. Moves the parameters into flat buffers. Every rank calls it with the same units.
  // Returns the unit's number among those that are gathered and released.
  int64_t add_unit(const std::vector<int64_t>& members, at::ScalarType dtype, UnitKind kind);
  // Parameter i is `tensor` from now on, which is in no unit yet.
  void replace_parameter(int64_t i, const at::Tensor& tensor);

  int64_t global_rank() const { return comm_.global_rank(); }
  int64_t world() const { return comm_.world(); }
  int64_t backwards() const { return backwards_; }
  const ShardedParameters& parameters() const { return parameters_; }
  const Policy& policy() const { return context_.policy; }
  const UnitContext& context() const { return context_; }
  // Full parameters come and go, or will when a frozen parameter is unfrozen.
  bool releases() const;
  // This rank's part of the parameter itself, where parameters are sharded; 1-D, compute dtype.
  at::Tensor parameter_slice(int64_t i);

  // See PublishedGradients; views and the reader are made by Python.
  void make_published(int64_t i);
  void set_view_maker(PublishedGradients::ViewMaker maker) {
    published_.set_view_maker(std::move(maker));
  }
  void set_local_reader(PublishedGradients::LocalReader reader) {
    published_.set_local_reader(std::move(reader));
  }

  // The boundary.
  void push_no_sync();
  void pop_no_sync();
  void set_accumulation_steps(int64_t steps);
  double divide_factor() const { return boundary_.divide_factor(); }
  void set_divide_factor(double factor);
  // What losses are multiplied by from now on; every rank calls it alike. See Note [Loss scale] in
  // boundary.h.
  void set_loss_scale(double scale);
  double gradient_divisor() const { return boundary_.divisor(); }

  // States in words that are out of reach: backward and step refuse until there are none.
  // On a device they move to the host, and back when they are in the words no more.
  // An error for want of memory leaves the old and the new ones out of reach; try again.
  void set_offloaded(const std::set<std::string>& states);
  std::set<std::string> offloaded();

  // Makes sure that the coming backward is seen, and on the stream of its forward: a cast to and
  // fro replaces autograd's nodes. Nobody calls it where an optimizer alone was replaced; then the
  // stream of a step counts.
  void before_forward();

  // Forwards of the modules whose parameters are gathered and released.
  int64_t add_hook_site(HookSite site);
  // `inputs`: all tensors in the arguments of the module, or none where no gradient is recorded.
  // Returns the call that a backward may enter, for leave_forward(); null without `inputs`.
  std::shared_ptr<Call> enter_forward(int64_t site,
                                      const std::optional<std::vector<at::Tensor>>& inputs);
  // `outputs`: all tensors in what the module returned; `threw`: it raised an error instead.
  void leave_forward(int64_t site, const std::shared_ptr<Call>& call,
                     const std::vector<at::Tensor>& outputs, bool threw);
  void unshard();
  void reshard(Writes writes);
  // One rank may gather while the others do something else.
  bool serves_one_alone() const { return comm_.has_only_local_peers(); }
  bool held_by_user() const;  // unshard() was not taken back yet
  // All ranks' shards hold what was written to them; collective.
  void wait_for_shards();
  // Before the engine dies: one rank's parameters, all of which it has, become readable for ever.
  void give_parameters_back();
  std::vector<std::string> gathered_units() const;  // names, of those in memory now
  // Parameters that were frozen when the model was sharded and require a gradient now.
  std::vector<int64_t> unfrozen() const;

  // The step: prepare, then apply unless the verdict forbids it. Where settings differ nothing is
  // prepared.
  StepVerdict prepare_step(const std::vector<int64_t>& indices, const StepQuestions& questions,
                           int64_t* last_backward);
  void apply_step(const Update& update);
  void adopt_writes();
  // Waits for what the device knows of a step that was made.
  void settle(StepVerdict& verdict) const;
  // Scales the reduced gradients so that their 2-norm over all ranks is at most `max_norm`. Returns
  // the norm before, fp32 [], on the device; the same bits for any number of ranks.
  // `last_backward`: as of the last step.
  at::Tensor clip_gradients(const std::vector<int64_t>& indices, double max_norm,
                            int64_t last_backward);
  void scale_gradients(const std::vector<int64_t>& indices, const at::Tensor& factor);

  // A copy of this rank's part of the master of parameter i, with the user's writes to the
  // parameter; of a frozen one's values, in fp32. 1-D.
  at::Tensor current_master(int64_t i);
  // Parameter i, which may be frozen, becomes `value` and its master exactly that; all of it, the
  // same on every rank. Collective.
  void write_parameter(int64_t i, const at::Tensor& value);
  // The reduced gradient of parameter i, all of it, on every rank.
  void write_gradient(int64_t i, const at::Tensor& grad);
  // An optimizer steps parameter i from now on, or does no more.
  void add_stepper(int64_t i);
  void remove_stepper(int64_t i);
  enum class ZeroGrad { to_none, to_zero };
  void zero_grad(const std::vector<int64_t>& indices, ZeroGrad mode);

  std::map<std::string, int64_t> stats();

  // BackwardListener
  void before_gradient(int64_t i) override;
  void after_gradient(int64_t i) override;
  void backward_ended() override;
  void inner_backward_ended(int task) override;
  void backward_failed() noexcept override;
  void call_entered(const std::shared_ptr<Call>& call) override;
  void call_left(const std::shared_ptr<Call>& call) override;

 private:
  explicit Engine(EngineOptions options);
  bool on_host() const { return options_.device.is_cpu(); }
  void begin_backward(bool reduces);
  // On a device: what comes now is behind what sums, flags and masters were last given, on
  // whichever stream that was.
  void follow_last_use() const;
  void remember_use();
  // A backward runs on this thread that reaches a parameter, though it may not have yet.
  bool backward_reaches_us() const;
  void check_usable(const char* verb) const;
  void check_parameters_are_here(const char* verb) const;
  std::string offloaded_message(const char* verb) const;
  // See Note [Reduction order] in reductions.h. Collective; on a device it waits, once.
  void learn_reduction_order();
  // This rank had no backward for a step of these parameters; `last_backward`: as of their last
  // one.
  bool had_no_backward(const std::vector<int64_t>& indices, int64_t last_backward) const;
  // A backward without gradients on this rank, for the sake of ranks that have some.
  void take_part_in_others_backward();
  void leave_call(size_t index);
  std::vector<int64_t> all_gathered() const;
  enum class Gradients { own, of_others };
  void finish_backward(Gradients gradients);
  bool has_reduced_sums() const;
  enum class Whose { every, stepped };  // parameters: all, or those that an optimizer steps
  bool zeroed_all(Whose whose) const;
  void abort_backward();
  // What threw, and the passes of stage 3.
  void undo_backward() noexcept;
  void scale_runs(const std::vector<int64_t>& indices, const at::Tensor& factor);

  class Access {
   public:
    enum class Failures { wait_for, are_told };
    explicit Access(const Engine& engine, Failures failures = Failures::wait_for)
        : lock_(engine.mutex_, std::defer_lock) {
      const bool on_device = !engine.on_host();
      if (on_device && failures == Failures::wait_for) engine.watch_->wait_for_failures();
      lock_.lock();
      if (on_device) enter_device(engine, failures);
      // What is made here outlives an inference, and must not be of it.
      if (c10::InferenceMode::is_enabled()) {
        no_inference_.emplace(false);
        no_grad_.emplace();
      }
    }

   private:
    void enter_device(const Engine& engine, Failures failures);

    std::unique_lock<std::mutex> lock_;
    std::optional<c10::InferenceMode> no_inference_;
    std::optional<at::NoGradGuard> no_grad_;
    c10::OptionalDeviceGuard device_;
    c10::OptionalStreamGuard stream_;
  };

  mutable std::mutex mutex_;
  // Of its last hook: a failure is told of where another one is current.
  mutable std::optional<c10::Stream> backward_stream_;
  std::optional<StreamEvent> last_use_;
  EngineOptions options_;
  Comm comm_;
  std::unique_ptr<DeviceFlags> flags_;
  UnitContext context_;
  ShardedParameters parameters_;
  PublishedGradients published_;
  FinishedBackwards finished_;
  Reductions reductions_;
  StepAgreement agreement_;
  Boundary boundary_;
  std::shared_ptr<BackwardWatch> watch_;
  Gatherer gatherer_;
  std::vector<int64_t> gathered_as_;         // of the units, their numbers in gatherer_
  std::vector<int64_t> frozen_gathered_as_;  // of the frozen ones

  // Of each parameter, how many optimizers step it: one or none. An optimizer may be deleted by a
  // thread that holds the GIL, which who has mutex_ may wait for: hence a lock that nothing is
  // waited for with.
  mutable std::mutex steppers_mutex_;
  std::vector<int32_t> steppers_;

  // Between backwards.
  std::vector<uint8_t> zeroed_;  // [parameters]: whose gradients were, since the last one
  int64_t backwards_ = 0;        // begun
  int64_t steps_ = 0;
  int64_t stepped_ = 0;  // the last backward that a step was made after, of any optimizer
  std::set<std::string> offloaded_;
  bool threw_ = false;      // a backward since the last step
  std::string not_undone_;  // the error that kept a backward from being undone
  bool shutdown_begun_ = false;
  bool sees_forwards_ = false;

  // One backward.
  bool open_ = false;
  int last_task_ = -1;  // that entered a call
  struct OpenCall {
    int task;
    std::shared_ptr<Call> call;
  };
  std::vector<OpenCall> open_calls_;
  int64_t begun_units_ = 0;
  bool reduces_ = false;
  bool hidden_ = false;  // more gradients may arrive than the graph shows
  GradientScales scales_;

  // stats
  int64_t gathers_ = 0;
  int64_t reduced_in_no_sync_ = 0;
};

}  // namespace zero_ext
