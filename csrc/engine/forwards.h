// Forwards: forwards of the modules whose parameters are gathered and released, and the user's own
// unshard() and reshard().
//
// Owner:     Engine.
// Threads:   public methods take the lock, except those that take a `const Access&` or read
//            constants.
// Invariant: the gatherer numbers trainable and frozen units together, in the order of add_unit().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/backward_listener.h"
#include "autograd/call.h"
#include "engine/engine_parts.h"

namespace zero_ext {

class Forwards : Facet {
 public:
  explicit Forwards(EngineParts& parts) : Facet(parts) {}

  // Whom calls tell that a backward enters or leaves them; before the first of them.
  void set_listener(std::weak_ptr<BackwardListener> listener) { listener_ = std::move(listener); }

  int64_t add_hook_site(HookSite site);
  int64_t add_inner_site(const std::vector<int64_t>& sites);
  bool is_recomputed(int64_t site) const;
  // See ResidencyTable::Watcher: of a trainable unit, or of a frozen one. It runs Python.
  void watch_unit(int64_t u, bool frozen, ResidencyTable::Watcher watcher);
  // `inputs`: all tensors in the arguments of the module, or none where no gradient is recorded.
  // Returns the call that a backward may enter, for leave(); null without `inputs`.
  std::shared_ptr<Call> enter(int64_t site, const std::optional<std::vector<at::Tensor>>& inputs);
  // `outputs`: all tensors in what the module returned; `threw`: it raised an error instead.
  void leave(int64_t site, const std::shared_ptr<Call>& call,
             const std::vector<at::Tensor>& outputs, bool threw);
  // Of the units of `site`; none given: of all.
  void unshard(std::optional<int64_t> site);
  void reshard(Writes writes, std::optional<int64_t> site);
  // Of the units of `site`, see Gatherer.
  void start_gathers(int64_t site);
  void set_reshard_after_forward(int64_t site, bool reshards);
  void set_reshard_after_backward(int64_t site, bool reshards);
  void release_kept();        // see Gatherer
  bool held_by_user() const;  // unshard() of all units was called, and reshard() was not yet
  std::vector<std::string> gathered_units() const;  // names of the units that are in memory now
  // Full parameters come and go, or will when a frozen parameter is unfrozen.
  bool releases() const;
  // A rank may gather while the others do something else.
  bool serves_one_alone() const {
    const Gathers gathers = comm_.way().gathers;
    return gathers == Gathers::persistent || gathers == Gathers::pulled;
  }
  // Waits until all ranks' shards hold what was written to them. Collective.
  void wait_for_shards();
  // Before the engine is deleted: the parameters of one rank, which has all of them, stay readable.
  void give_parameters_back();

  // The gatherer's numbers of the frozen units in which `members` lie.
  std::vector<int64_t> frozen_units_of(const Access& access,
                                       const std::vector<int64_t>& members) const;
  // The last unit of its kind, wherever `unfrozen` are needed. Returns the gatherer's number of it.
  int64_t add_unit(const Access& access, UnitKind kind, const std::vector<int64_t>& unfrozen);
  // The gatherer's number of trainable unit u, and the trainable unit that has that number.
  int64_t number_of(int64_t u) const { return gathered_as_[u]; }
  std::optional<int64_t> unit_of(int64_t number) const;

 private:
  std::vector<int64_t> all_units() const;
  std::vector<int64_t> units_of(std::optional<int64_t> site) const;

  std::weak_ptr<BackwardListener> listener_;
  std::vector<int64_t> gathered_as_;         // [units]: the gatherer's numbers of them
  std::vector<int64_t> frozen_gathered_as_;  // [frozen units]
};

}  // namespace zero_ext
