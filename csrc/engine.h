// Engine: the units of one model in their order, and when each verb runs.
//
// Owner:     the sharded module or its optimizer, through Python.
// Threads:   every public function takes mutex_ and makes our device the current one (Access), and
// is called without the GIL; hooks come from autograd's threads. Invariant: reductions start in
// unit order, the same on every rank; every unit is reduced exactly once in a backward
//            that reduces. Between two backwards, a parameter's .grad is its published view or
//            None, or what the user put there since.
//
// Note [Loss scale]
// Gradients of a scaled loss are divided by the scale where they are added to the fp32 sum, by the
// factor that divides by the number of ranks, so that it costs nothing, .grad shows true gradients
// whenever it is looked at, and micro-batches of different scales add up. What travels, and what is
// searched for NaN and Inf, still has the scale. Rejected: dividing in the update kernel, which is
// wrong once the scale has changed between two micro-batches, and makes every reader of .grad ask
// for the scale. Local sums keep the scale of the first micro-batch, since a reduction in half
// precision may have to send them; contributions of another scale are converted to it. The first
// one is told by local_next_, which is the same on ranks that run no backward.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <unistd.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "autograd.h"
#include "bucket.h"
#include "comm.h"
#include "device_flags.h"
#include "gatherer.h"
#include "unit.h"

namespace zero_ext {

struct EngineOptions {
  int stage = 1;
  c10::Device device = c10::kCPU;  // of the parameters
  bool offload = false;            // to the host: what an update needs
  bool pin_memory = true;          // of it
  std::string reduce_group;        // names of process groups; both empty: one rank alone
  std::string gather_group;
  int64_t timeout_ms = 0;    // of messages that no process group carries, and of what is watched
  bool cross_memory = true;  // where it can be
  Reduction reduction = Reduction::exchange;
  std::optional<at::ScalarType> reduce_dtype;
  double divide_factor = 0;        // gradients are divided by it; 0: by the number of ranks
  int64_t accumulation_steps = 1;  // every n-th backward is a boundary
  bool broadcast = true;           // rank 0's parameter values are everybody's
  int64_t limit_bytes = std::numeric_limits<int64_t>::max();
  GatherOptions gather;
};

// What an update wants to know of the gradients first; every rank asks the same.
struct StepQuestions {
  bool nonfinite = true;           // whether any holds NaN or Inf
  std::optional<double> max_norm;  // and their norm, with the factor that clips them to this one
  bool norm() const { return max_norm.has_value(); }
};

// A verdict that the device alone knows so far.
struct DeviceVerdict {
  at::Tensor skip;                        // int32 [1]: not 0 where the gradients hold NaN or Inf
  at::Tensor norm;                        // fp32 [], undefined where it was not asked for
  at::Tensor factor;                      // fp32 [1], of the gradients; undefined likewise
  at::Tensor sighting;                    // int64 [1] in pinned host memory: the first one, or none
  c10::Event told{c10::DeviceType::CPU};  // `sighting` is there
};

// What all ranks agreed on before an update.
struct StepVerdict {
  bool nonfinite = false;
  int64_t rank = -1;  // where the first NaN or Inf was seen
  std::string parameter;
  int64_t micro_batch = -1;
  float norm = 0;    // where it was asked for
  float factor = 1;  // which clips it
  // Where the sums lie on a device: what is above is not known before settle().
  std::shared_ptr<DeviceVerdict> on_device;
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
  void say_farewell() noexcept;

  // Behind the ones that exist; their hooks do nothing until they are in a unit.
  void add_parameters(const std::vector<at::Tensor>& parameters,
                      const std::vector<std::string>& names);
  // Units of parameter indices, in the order in which they will be reduced, behind the ones that
  // exist. Moves the parameters into flat buffers. Every rank calls it with the same units.
  // Returns the unit's number among those that are gathered and released.
  int64_t add_unit(const std::vector<int64_t>& members, at::ScalarType dtype, UnitKind kind);
  // Parameter i is `tensor` from now on, which is in no unit yet.
  void replace_parameter(int64_t i, const at::Tensor& tensor);

  int64_t rank() const { return comm_.rank(); }
  int64_t world() const { return comm_.world(); }
  int64_t parameter_count() const { return static_cast<int64_t>(parameters_.size()); }
  int64_t backwards() const { return backwards_; }
  int64_t unit_count() const { return static_cast<int64_t>(units_.size()); }
  Unit& unit(int64_t u) { return *units_[u]; }
  int64_t unit_of(int64_t i) const { return parameters_[i].unit; }
  int64_t frozen_unit_of(int64_t i) const { return parameters_[i].frozen_unit; }
  // Full parameters come and go, or will when a frozen parameter is thawed.
  bool releases() const;
  int64_t slot_of(int64_t i) const { return parameters_[i].slot; }
  const std::string& name_of(int64_t i) const { return parameters_[i].name; }
  const std::shared_ptr<MemoryCounter>& memory() const { return context_.memory; }
  const Policy& policy() const { return context_.policy; }
  const UnitContext& context() const { return context_; }

  // What a parameter's .grad shows after a reduction: `view` over `local`, which is grad_slice(i),
  // made by Python.
  void set_published(int64_t i, const at::Tensor& view, const at::Tensor& local);
  at::Tensor grad_slice(int64_t i) {
    return units_[parameters_[i].unit]->sums().slice(parameters_[i].slot);
  }
  at::Tensor master_slice(int64_t i) {
    return units_[parameters_[i].unit]->parameters().master_slice(parameters_[i].slot);
  }
  // The unit in which parameter i lies, trainable or not.
  Unit& home_of(int64_t i) const {
    const Parameter& parameter = parameters_[i];
    return parameter.unit >= 0 ? *units_[parameter.unit] : *frozen_units_[parameter.frozen_unit];
  }
  // This rank's part of the parameter itself, where parameters are sharded; 1-D, compute dtype.
  at::Tensor parameter_slice(int64_t i);
  // This rank's part of a tensor subclass that a user put into .grad, 1-D; Python's part of the
  // job.
  void set_local_reader(std::function<at::Tensor(const at::Tensor&)> reader) {
    local_reader_ = std::move(reader);
  }

  // The boundary.
  void push_no_sync();
  void pop_no_sync();
  void set_accumulation_steps(int64_t steps);
  void set_divide_factor(double factor);
  // What losses are multiplied by from now on; every rank calls it alike. See Note [Loss scale].
  void set_loss_scale(double scale);

  // States in words that are out of reach: backward and step refuse until there are none.
  // On a device they move to the host, and back when they are in the words no more.
  // An error for want of memory leaves the old and the new ones out of reach; try again.
  void set_offloaded(const std::set<std::string>& states);
  std::set<std::string> offloaded();

  // Makes sure that the coming backward is seen: a cast to and fro replaces autograd's nodes.
  void before_forward();

  // Forwards of the modules whose parameters are gathered and released.
  int64_t add_site(Site site);
  void enter_forward(int64_t site);
  // `outputs`: all tensors in what the module returned.
  void leave_forward(int64_t site, const std::vector<at::Tensor>& outputs,
                     bool backward_may_follow);
  std::shared_ptr<Call> begin_call(int64_t site);
  void unshard();
  void reshard(Writes writes);
  // One rank may gather while the others do something else.
  bool serves_one_alone() const { return comm_.has_only_neighbors(); }
  bool held_by_user() const;  // unshard() was not taken back yet
  // All ranks' shards hold what was written to them; collective.
  void wait_for_shards();
  // Before the engine dies: one rank's parameters, all of which it has, become readable for ever.
  void give_parameters_back();
  std::vector<std::string> gathered_units() const;  // names, of those in memory now
  // Parameters that were frozen when the model was sharded and require a gradient now.
  std::vector<int64_t> thawed() const;

  // The step: prepare, then apply unless the verdict forbids it.
  StepVerdict prepare_step(const std::vector<int64_t>& indices, const StepQuestions& questions,
                           int64_t* last_backward);
  void apply_step(const Update& update);
  void adopt_writes();
  // Whether settle() would not wait.
  static bool is_settled(const StepVerdict& verdict);
  // Waits for what the device knows of a step that was made.
  void settle(StepVerdict& verdict) const;
  // Scales the reduced gradients so that their 2-norm over all ranks is at most `max_norm`. Returns
  // the norm before, fp32 [], on the device; the same bits for any number of ranks.
  at::Tensor clip_gradients(const std::vector<int64_t>& indices, double max_norm);
  void scale_gradients(const std::vector<int64_t>& indices, const at::Tensor& factor);

  // A copy of this rank's part of the master of parameter i, with the user's writes to the
  // parameter; of a frozen one's values, in fp32. 1-D.
  at::Tensor current_master(int64_t i);
  // Parameter i, which may be frozen, becomes `value` and its master exactly that; all of it, the
  // same on every rank. Collective.
  void write_parameter(int64_t i, const at::Tensor& value);
  // The reduced gradient of parameter i, all of it, on every rank.
  void write_gradient(int64_t i, const at::Tensor& grad);
  enum class ZeroGrad { to_none, to_zero };
  void zero_grad(const std::vector<int64_t>& indices, ZeroGrad mode);

  std::map<std::string, int64_t> stats();

  // BackwardListener
  void before_gradient(int64_t i) override;
  void after_gradient(int64_t i) override;
  void backward_ended() override;
  void backward_failed() noexcept override;
  void call_entered(const std::shared_ptr<Call>& call) override;
  void call_left(const std::shared_ptr<Call>& call) override;

 private:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
    int64_t unit = -1;  // -1: frozen when it was sharded
    int64_t slot = -1;
    int64_t frozen_unit = -1;  // in frozen_units_, where frozen parameters are sharded too
    NodePtr node;
    at::Tensor published_view;
    at::Tensor published_local;     // the 1-D tensor that published_view shows
    int64_t published_version = 0;  // of both, when the gradient was last known to be ours
    bool published = false;
    int64_t nonfinite_micro_batch = -1;  // where this rank's own gradient held NaN or Inf
  };

  explicit Engine(EngineOptions options);
  void begin_backward(bool reduces);
  bool next_backward_reduces() const {
    // There is no memory for local sums of the whole gradient where sums are offloaded.
    return policy().reduce == When::every_backward || at_boundary() || context_.offloads();
  }
  bool at_boundary() const;
  // A backward runs on this thread that reaches a parameter, though it may not have yet.
  bool backward_reaches_us() const;
  void check_usable(const char* verb);
  void check_parameters(const char* verb);
  // Hooks the nodes that autograd has put in the place of ours; whose they are.
  std::vector<int64_t> repair_hooks();
  void take_over_grads(const std::vector<int64_t>& indices, const char* verb);
  void write_gradient(Parameter& parameter, const at::Tensor& grad);
  void withdraw();
  void publish();
  void clear_gradient(Parameter& parameter);
  void leave_call(size_t index);
  std::vector<int64_t> all_gathered() const;
  void lend_bucket(Unit& unit);
  void start_ready_reductions();
  void finish_oldest_reduction();
  void drop_orphans();
  void finish_backward();
  void abort_backward() noexcept;
  void set_scales(Sink sink);
  void set_local_next(bool next);
  void scale_runs(const std::vector<int64_t>& indices, const at::Tensor& factor);
  // The user gave parameter i another storage.
  bool lies_elsewhere(int64_t i) const;
  // If so, its values are taken over, or forgotten.
  void repair_storage(int64_t i, Writes writes);
  void saw_nonfinite(Parameter& parameter) const;
  StepVerdict agree_on_gradients(const std::vector<int64_t>& indices,
                                 const StepQuestions& questions, const char* verb);
  StepVerdict agree_on_device(const std::vector<int64_t>& indices, const StepQuestions& questions,
                              const char* verb);
  void describe(int64_t first_sighting, StepVerdict& verdict) const;
  void search_suspects(const std::vector<int64_t>& indices);
  // Squares of this rank's reduced gradients; `sum` lies where they do.
  void add_own_squares(const std::vector<int64_t>& indices, kernels::SquareSum* sum) const;
  bool managed(int64_t i) const { return parameters_[i].unit >= 0; }
  GradientSums& sums_of(const Parameter& parameter) const { return units_[parameter.unit]->sums(); }

  class Access {
   public:
    enum class Failures { wait_for, are_told };
    explicit Access(const Engine& engine, Failures failures = Failures::wait_for)
        : lock_(engine.mutex_, std::defer_lock) {
      const bool on_device = !engine.options_.device.is_cpu();
      if (on_device && failures == Failures::wait_for) engine.watch_->wait_for_failures();
      lock_.lock();
      if (on_device) guard_.reset_device(engine.options_.device);
    }

   private:
    std::unique_lock<std::mutex> lock_;
    c10::OptionalDeviceGuard guard_;
  };

  mutable std::mutex mutex_;
  EngineOptions options_;
  Comm comm_;
  std::unique_ptr<DeviceFlags> flags_;
  UnitContext context_;
  BucketPool pool_;
  std::shared_ptr<BackwardWatch> watch_;
  std::vector<Parameter> parameters_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::unique_ptr<Unit>> frozen_units_;
  Gatherer gatherer_;
  std::vector<int64_t> gathered_as_;         // of units_, their numbers in gatherer_
  std::vector<int64_t> frozen_gathered_as_;  // of frozen_units_
  std::vector<std::vector<int64_t>> unit_parameters_;
  std::function<at::Tensor(const at::Tensor&)> local_reader_;

  // Between backwards.
  int64_t no_sync_depth_ = 0;
  int64_t backwards_ = 0;       // begun
  int64_t rounds_ = 0;          // of them, those that reduce: on every rank alike
  int64_t micro_batch_ = 0;     // backwards since the last step
  int64_t since_boundary_ = 0;  // backwards since the last boundary
  int64_t steps_ = 0;
  bool local_open_ = false;  // this rank has local sums
  bool local_next_ = false;  // the next reduction is of local sums, on every rank alike
  std::set<std::string> offloaded_;
  double loss_scale_ = 1;
  double local_loss_scale_ = 1;  // that of the local sums; loss_scale_ unless local_next_

  bool said_farewell_ = false;
  pid_t process_ = getpid();

  // One backward.
  bool open_ = false;
  int last_task_ = -1;  // that entered a call
  struct OpenCall {
    int task;
    std::shared_ptr<Call> call;
  };
  std::vector<OpenCall> open_calls_;
  bool reduces_ = false;
  float accumulate_scale_ = 1;  // of gradients that are added to a direct or a local sum
  float reduce_scale_ = 1;      // of what a reduction adds
  bool deferred_ =
      false;          // reductions wait for the end: more gradients may arrive than the graph shows
  int64_t turn_ = 0;  // the next unit to reduce
  std::deque<int64_t> in_flight_;
  std::vector<Unit::Orphan> orphans_;  // of backwards that threw, until a later one reduces

  // stats
  int64_t reductions_ = 0;
  int64_t gathers_ = 0;
  int64_t reduced_in_no_sync_ = 0;
  int64_t extra_buckets_ = 0;
};

}  // namespace zero_ext
