// OptimizerState: the flat state of one optimizer over an engine's units, and the updates that use
// it. It asks the engine for the runs to update (StepUpdate), and loops over them.
//
// Owner:     the Python optimizer. Keeps the engine alive.
// Threads:   an update holds the engine's lock. Everything else is called by the optimizer's
//            thread.
// Invariant: each parameter of this optimizer is in one part of its unit's states, with its gap.
//            Neighbors in the unit that are in one part are neighbors there. So a run whose slots
//            are in one part is contiguous. Other optimizers' parameters take no memory here.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "memory/flat_buffer.h"

namespace zero_ext {

inline constexpr char kStatesOffloaded[] =
    "zero_ext: the optimizer's states are offloaded. Call zero_ext.reload_states() first.";

// The states of the parameters of one unit that were assigned together, on this rank.
struct StatePart {
  // [states]: fp32 or bf16; empty where there is nothing to hold.
  std::vector<FlatBuffer> values;
  // [states]: int8 alone, of slots in blocks, see Note [Blocks of a slot]; empty without such slots.
  std::vector<FlatBuffer> codes;   // int8, but uint8 of exp_avg_sq
  std::vector<FlatBuffer> scales;  // fp32, one for each block of the codes
};

struct UnitStates {
  std::vector<StatePart> parts;
  std::vector<int64_t> part_of;  // [slots]; -1: none
  std::vector<int64_t> begins;   // [slots]: in the values of its part, or in its codes
};

struct AdamGroup {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool amsgrad;
  bool maximize;
  bool decoupled;
};

struct SgdGroup {
  double lr;
  double momentum;
  double dampening;
  double weight_decay;
  bool nesterov;
  bool maximize;
};

class OptimizerState {
 public:
  // `states`: how many values each element has (2 for Adam, 3 with AMSGrad, 1 for SGD with
  // momentum). `moments`: how they are stored.
  OptimizerState(std::shared_ptr<Engine> engine, int64_t states, kernels::Moments moments);
  ~OptimizerState() {
    for (const int64_t i : indices_) engine_->steps().remove_stepper(i);
  }
  OptimizerState(const OptimizerState&) = delete;
  OptimizerState& operator=(const OptimizerState&) = delete;

  // From now on these parameters are updated, each with the hyper-parameters of its group. No other
  // ones are, but their state stays.
  void assign(const std::vector<int64_t>& parameters, const std::vector<int64_t>& groups);
  // This rank's part of state k of parameter i, 1-D: values, or codes where there are scales.
  at::Tensor slice(int64_t k, int64_t i) const;
  // The scales of the blocks of that part, fp32 [blocks]; none where the state is not in blocks.
  std::optional<at::Tensor> scales(int64_t k, int64_t i) const;
  // How often parameter i was updated: 0-D, fp32, as torch has it. SGD counts updates with momentum
  // alone, of which the first one begins the buffer. It lies on the device where the device decides
  // about a step.
  at::Tensor step(int64_t i) const { return steps_.at(i); }
  // Returns parameters that were unfrozen: then it has done nothing, and the caller shards them.
  std::vector<int64_t> zero_grad(ZeroGrad mode);

  const StepVerdict& prepare_step(const StepQuestions& questions) {
    return verdict_ = engine_->steps().prepare(indices_, questions, &last_backward_);
  }
  // See Steps::clip, of this optimizer's parameters.
  at::Tensor clip_gradients(double max_norm) {
    return engine_->steps().clip(indices_, max_norm, last_backward_);
  }
  // Skips or clips as the last verdict says.
  void apply_adam(const std::vector<AdamGroup>& groups);
  void apply_sgd(const std::vector<SgdGroup>& groups);
  // See Values::set_offloaded: the states of this optimizer.
  void set_offloaded(bool offloaded);
  // After other code has updated the masters: the parameters become their roundings.
  void apply_masters();

 private:
  // `counted_groups`: [groups], those whose parameters' steps are counted. Default: all.
  template <typename Body>
  void apply(const Body& body, const std::vector<uint8_t>& counted_groups = {});
  void allocate_for(int64_t i);  // all but its states
  // The states of those slots of unit u that have none.
  void allocate_part(int64_t u, const std::vector<int64_t>& slots);
  bool counts_on_device() const { return !engine_->context().state.on_host(); }
  // Reads the counts that the user wrote to, which waits.
  void read_written_counts();
  // Corrects presumed_ by the steps that the device is known to have skipped.
  void look_at_steps_in_flight();
  // [parameters]: which of the steps in flight have updated each, one bit per step. Empty where
  // there is no such step.
  std::vector<uint64_t> histories_in_flight() const;
  at::Tensor step_increment() const;  // on the device: 1, or 0 where the step is skipped
  void count_on_device(const std::vector<int64_t>& updated, const at::Tensor& increment);
  kernels::OnDevice on_device(int64_t i) const;
  bool in_blocks(int64_t i) const;
  at::Tensor nothing_of(const std::vector<FlatBuffer>& buffers, int64_t k,
                        at::ScalarType dtype) const;
  const StatePart& part_of(int64_t i) const;
  // State k of the part that has parameter i, from the part's beginning on.
  void* state_data(int64_t k, int64_t i) const;

  std::shared_ptr<Engine> engine_;
  int64_t states_;
  kernels::Moments moments_;
  std::vector<int64_t> indices_;
  std::vector<int64_t> group_of_;    // [parameters of the engine]; -1: not of this optimizer
  std::vector<UnitStates> buffers_;  // [units]
  std::vector<at::Tensor> steps_;    // [parameters of the engine]
  // On a device the host learns later whether a step was skipped; until then it is in flight.
  // presumed_ is what steps_ would be if none in flight was skipped. versions_ are those of steps_
  // after the last write from here. Parameters with the same presumed count that were updated by
  // the same steps in flight have the same count, whatever the device decides.
  struct InFlight {
    std::shared_ptr<DeviceVerdict> verdict;
    std::vector<int64_t> updated;
  };
  static constexpr int64_t kStepsInFlight = 64;  // the oldest of more is waited for
  std::vector<int64_t> presumed_;
  std::vector<int64_t> versions_;
  std::deque<InFlight> in_flight_;
  StepVerdict verdict_;
  int64_t last_backward_ = 0;
};

}  // namespace zero_ext
