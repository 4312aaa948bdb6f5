// Engine: the units of one model, and the facets that say when each verb runs on them.
//
// Each facet owns the state that its verbs use together. It calls those to its right alone:
//
//   Changes ──► Values, Steps (StepUpdate) ──► RunningBackward ──► Forwards ──► EngineParts, Access
//
// Owner:     the sharded module or its optimizer, through Python.
// Threads:   called without the GIL. Every public method takes the lock, except for getters of
//            constants; hooks come from autograd's threads.
// Invariant: a backward that threw, and a verb that raised, leave parameters, sums and states as
//            they were.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/changes.h"
#include "engine/engine_parts.h"
#include "engine/forwards.h"
#include "engine/running_backward.h"
#include "engine/steps.h"
#include "engine/values.h"

namespace zero_ext {

class Engine {
 public:
  // `destroy` deletes it, for a caller who must prepare for that: it waits for gloo's threads.
  static std::shared_ptr<Engine> create(EngineOptions options, void (*destroy)(Engine*));
  ~Engine();

  // This rank reads nothing more from the others. What they may still read outlives the engine.
  void begin_shutdown() noexcept;

  // After the existing ones. Their hooks do nothing until they are in a unit.
  void add_parameters(const std::vector<at::Tensor>& parameters,
                      const std::vector<std::string>& names);
  // Moves the parameters `members` into flat buffers. Units are reduced in the order in which they
  // were added. Every rank adds the same units. Returns the unit's number among those that are
  // gathered and released.
  int64_t add_unit(const std::vector<int64_t>& members, at::ScalarType dtype, UnitKind kind);
  // Parameter i, which is in no unit yet, is `tensor` from now on.
  void replace_parameter(int64_t i, const at::Tensor& tensor);
  // Parameter i, which is in no unit yet, is a DTensor.
  void set_local(int64_t i, const at::Tensor& local, int64_t norm_row, bool is_expert);
  // What DTensors need, and those over dimensions that this does not shard over. Both run Python.
  void set_to_local(PublishedGradients::ToLocal to_local);
  void set_across_meshes(AcrossMeshes across);
  // See unfrozen_among().
  std::vector<int64_t> unfrozen() const;

  Forwards& forwards() { return forwards_; }
  RunningBackward& backward() { return backward_; }
  Values& values() { return values_; }
  Changes& changes() { return changes_; }
  Steps& steps() { return steps_; }

  const ShardedParameters& parameters() const { return parts_.parameters; }
  const UnitContext& context() const { return parts_.context; }
  // Why this rank's device does not read the other ranks' gradients in place; "": it does.
  const std::string& why_sent() const { return parts_.comm.why_sent(); }
  std::map<std::string, int64_t> stats();

 private:
  explicit Engine(EngineOptions options);
  std::unique_ptr<Unit> make_unit(const std::vector<int64_t>& members, at::ScalarType dtype,
                                  UnitKind kind);

  // Taken by const methods, too.
  mutable EngineParts parts_;
  Forwards forwards_;
  RunningBackward backward_;
  Values values_;
  Changes changes_;
  Steps steps_;
  bool shutdown_begun_ = false;
};

}  // namespace zero_ext
