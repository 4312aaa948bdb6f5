// EngineParts: what the facets of an engine work on.
//
// Owner:     Engine.
// Threads:   used under the lock alone, except for the constants `options` and `context`.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "autograd/backward_phase.h"
#include "comm/comm.h"
#include "device/last_use.h"
#include "engine/access.h"
#include "engine/engine_options.h"
#include "gather/gatherer.h"
#include "reduce/boundary.h"
#include "reduce/published_gradients.h"
#include "reduce/reductions.h"
#include "step/step_agreement.h"
#include "units/finished_backwards.h"
#include "units/nan_records.h"
#include "units/sharded_parameters.h"

namespace zero_ext {

// The states that the user has offloaded, by their names, and the errors of verbs that need them.
class OffloadedStates {
 public:
  explicit OffloadedStates(int64_t rank) : rank_(rank) {}
  const std::set<std::string>& names() const { return names_; }
  bool contain(const std::string& name) const { return names_.count(name) > 0; }
  void become(const std::set<std::string>& names) { names_ = names; }
  void add(const std::set<std::string>& names) { names_.insert(names.begin(), names.end()); }
  // `verb`: in the message.
  void check_none(const char* verb) const { check(names_.empty(), verb); }
  void check_parameters_are_here(const char* verb) const {
    check(!contain("full") && !contain("master"), verb);
  }
  void check_forward() const;

 private:
  void check(bool here, const char* verb) const;

  const int64_t rank_;
  std::set<std::string> names_;
};

// Of units whose parameters lie on a subset of the engine's ranks, as those of experts do.
struct Subset {
  Comm comm;
  UnitContext context;
};

struct EngineParts {
  explicit EngineParts(EngineOptions given);
  EngineParts(const EngineParts&) = delete;
  EngineParts& operator=(const EngineParts&) = delete;
  // All of them, or those with the same experts.
  Unit::Ranks ranks_of(bool experts);

  const EngineOptions options;
  LastUse last_use;
  Comm comm;
  EngineLock lock;
  OffloadedStates offloaded;
  NanRecords nan_records;
  UnitContext context;
  const std::vector<int64_t> no_places{};
  std::unique_ptr<Subset> of_experts;  // null: there are none
  ShardedParameters parameters;
  FinishedBackwards finished;
  PublishedGradients published;
  Reductions reductions;
  StepAgreement agreement;
  Boundary boundary;
  BackwardPhase backward_phase = BackwardPhase::none;
  Gatherer gatherer;

 private:
  void make_subset();
  Comm::Kinds kinds_of(const Comm& ranks) const;
  Comm subset_comm(const std::vector<int64_t>& ranks) const;
};

// The parts by the names that facets have for them.
class Facet {
 protected:
  explicit Facet(EngineParts& parts)
      : lock_(parts.lock),
        last_use_(parts.last_use),
        comm_(parts.comm),
        offloaded_(parts.offloaded),
        context_(parts.context),
        parameters_(parts.parameters),
        finished_(parts.finished),
        published_(parts.published),
        reductions_(parts.reductions),
        agreement_(parts.agreement),
        boundary_(parts.boundary),
        gatherer_(parts.gatherer) {}

  EngineLock& lock_;
  LastUse& last_use_;
  Comm& comm_;
  OffloadedStates& offloaded_;
  const UnitContext& context_;
  ShardedParameters& parameters_;
  FinishedBackwards& finished_;
  PublishedGradients& published_;
  Reductions& reductions_;
  StepAgreement& agreement_;
  Boundary& boundary_;
  Gatherer& gatherer_;
};

}  // namespace zero_ext
