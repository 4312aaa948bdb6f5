// ShardedParameters: the parameters of one model, the units that they lie in, and the autograd
// nodes whose hooks see their gradients.
//
// Owner:     Engine.
// Threads:   called only under the engine's lock.
// Invariant: a parameter whose unit is u and whose slot is s is members(u)[s].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "autograd/backward_listener.h"
#include "autograd/parameter_hooks.h"
#include "units/unit.h"

namespace zero_ext {

struct ShardedParameter {
  at::Tensor tensor;  // the user's Parameter, which autograd knows
  at::Tensor local;   // what holds its values: itself, or the local tensor of a DTensor
  std::string name;
  int64_t unit = -1;  // -1: frozen when it was sharded
  int64_t slot = -1;
  int64_t frozen_unit = -1;  // among the frozen units, where frozen parameters are sharded too
  int64_t norm_row = 0;      // see AcrossMeshes
  bool is_expert = false;    // only the ranks of a subset hold it together
  NodePtr node{};

  bool managed() const { return unit >= 0; }
  // It lies in a unit, trainable or not.
  bool has_home() const { return managed() || frozen_unit >= 0; }
  // It is a DTensor over dimensions of a mesh that the engine does not shard over.
  bool is_distributed() const { return !local.is_same(tensor); }
};

class ShardedParameters {
 public:
  explicit ShardedParameters(const UnitContext& context) : context_(context) {}

  // The listener that the hooks call. To be set before any parameter is added.
  void set_listener(std::weak_ptr<BackwardListener> listener) { listener_ = std::move(listener); }

  // Appends a parameter, which is in no unit yet.
  void add(const at::Tensor& tensor, std::string name);
  // Parameter i is `tensor` from now on.
  void replace(int64_t i, const at::Tensor& tensor);
  // Moves the parameters `members` into `unit`. Returns its number among the units of its kind.
  int64_t add_unit(std::unique_ptr<Unit> unit, UnitKind kind, const std::vector<int64_t>& members);

  int64_t size() const { return static_cast<int64_t>(all_.size()); }
  // An index that is out of range raises, here and below.
  ShardedParameter& operator[](int64_t i) { return all_.at(i); }
  const ShardedParameter& operator[](int64_t i) const { return all_.at(i); }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }

  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  const std::vector<std::unique_ptr<Unit>>& frozen_units() const { return frozen_units_; }
  int64_t unit_count() const { return static_cast<int64_t>(units_.size()); }
  Unit& unit(int64_t u) const { return *units_.at(u); }
  // Parameters of unit u, by slot.
  const std::vector<int64_t>& members(int64_t u) const { return members_[u]; }
  // The unit in which parameter i lies, trainable or not. Raises where it lies in none.
  Unit& home_of(int64_t i) const;
  // The unit that sums up its gradients. Raises where it is frozen.
  Unit& trainable_home_of(int64_t i) const;
  // The number of parameter i's NaN record.
  int64_t record_of(int64_t i) const { return trainable_home_of(i).record(all_[i].slot); }
  GradientSums& sums_of(int64_t i) const { return trainable_home_of(i).sums(); }
  // This rank's part of parameter i, 1-D: of its reduced gradient, of its master, and of itself,
  // where parameters are sharded, in the compute dtype.
  at::Tensor grad_slice(int64_t i) const { return sums_of(i).slice(all_[i].slot); }
  at::Tensor master_slice(int64_t i) const {
    return home_of(i).parameters().master_slice(all_[i].slot);
  }
  at::Tensor shard_slice(int64_t i) const {
    return home_of(i).parameters().shard_slice(all_[i].slot);
  }

  // Runs of those of parameters `indices` that have a reduced sum, unit by unit.
  void for_each_summed_run(const std::vector<int64_t>& indices,
                           const std::function<void(GradientSums&, const Run&)>& apply) const;

  // Raises if a parameter has another size, dtype or device than when it was sharded, or if
  // autograd has replaced a node, so that gradients were not seen. `verb`: for the message.
  void check(const char* verb);
  // Hooks the nodes that autograd has replaced. Returns their parameters.
  std::vector<int64_t> repair_hooks();
  // On a device, between backwards: moves the nodes to the current stream, which the nodes of the
  // coming forward belong to. Otherwise autograd would hand gradients from stream to stream, which
  // the capture of a graph forbids where one of the streams is the default one.
  void follow_stream();
  // The user gave parameter i another storage.
  bool lies_elsewhere(int64_t i) const;
  // If so, adopts its values or forgets them, and puts the parameter back into its unit.
  void repair_storage(int64_t i, Writes writes);

 private:
  NodePtr hook(int64_t i) const { return hook_parameter(all_[i].tensor, i, listener_); }

  const UnitContext& context_;
  std::weak_ptr<BackwardListener> listener_;
  std::vector<ShardedParameter> all_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::unique_ptr<Unit>> frozen_units_;
  std::vector<std::vector<int64_t>> members_;  // [units]
};

// Parameters that were frozen when the model was sharded and require a gradient now.
std::vector<int64_t> unfrozen_among(const ShardedParameters& parameters);
// See WrittenValues::note, digest and accept_written.
void note_writes(ShardedParameters& parameters, int64_t i);
int64_t written(const ShardedParameters& parameters, int64_t i);
void accept_written(ShardedParameters& parameters);
// Raises if a parameter has another number of elements than when it was sharded. If the model
// `trains`: also if it has another dtype or device, or if DistributedDataParallel reduces it, too.
void check_kinds(const ShardedParameters& parameters, const UnitContext& context, const char* verb,
                 bool trains);

}  // namespace zero_ext
