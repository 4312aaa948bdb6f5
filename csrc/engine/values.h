// Values: parameters, masters and gradients that are read and written from outside, and states that
// are offloaded and reloaded.
//
// Owner:     Engine.
// Threads:   public methods take the lock.
// Invariant: an error leaves every value as it was, or the states that it concerns offloaded.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/engine_parts.h"
#include "engine/running_backward.h"

namespace zero_ext {

class Values : Facet {
 public:
  Values(EngineParts& parts, const RunningBackward& backward) : Facet(parts), backward_(backward) {}

  // This rank's part of the parameter itself, where parameters are sharded; 1-D, compute dtype.
  at::Tensor parameter_slice(int64_t i) const;
  // A copy of this rank's part of the master of parameter i, with the user's writes to the
  // parameter. For a frozen parameter: its values in fp32. 1-D.
  at::Tensor current_master(int64_t i) const;
  // Parameter i, which may be frozen, becomes `value`, and its master exactly that. `value`: the
  // whole parameter, the same on every rank. Collective.
  void write_parameter(int64_t i, const at::Tensor& value);
  // Parameters `indices`, which lie in units, whole into `into`: 1-D tensors, each in the memory
  // order of its parameter and of any dtype. `masters`: the values of the masters, else those of
  // the parameters.
  struct Whole {
    std::vector<int64_t> indices;
    std::vector<at::Tensor> into;
    bool masters = false;
  };
  // `wanted`: by this rank. Returns false, and sends nothing, where no rank wants them. Collective.
  bool gather_whole(const Whole& whole, bool wanted);
  // This rank's part of what parameter i holds, with the user's writes. 1-D. Under the lock.
  at::Tensor written_part(int64_t i) const;
  // On this rank alone, where it holds all of them, or reads the memory of all others. Without
  // `masters` in the second case.
  void read_whole(const Whole& whole);
  // The whole reduced gradient of parameter i, the same on every rank.
  void write_gradient(int64_t i, const at::Tensor& grad);

  // From now on backwards leave this rank's own gradients in .grad, and reduce nothing.
  void keep_local_gradients();
  // No longer. Returns these gradients, or what other code has written there, by parameter.
  std::map<int64_t, at::Tensor> take_local_gradients();

  // See PublishedGradients; Python makes the views and the reader.
  void set_view_maker(PublishedGradients::ViewMaker maker);
  void set_local_reader(PublishedGradients::LocalReader reader);

  // The states `names`, and no others, become unreadable: backward and step raise an error while
  // there are any. On a device they move to the host, and back when they are no longer named. Where
  // memory runs out, the old and the new names are offloaded; call it again.
  void set_offloaded(const std::set<std::string>& names);
  std::set<std::string> offloaded() const;

 private:
  // This rank's part of what parameter i holds, or its master with what users wrote.
  void copy_own_part(int64_t i, bool master, const at::Tensor& into) const;

  const RunningBackward& backward_;
};

}  // namespace zero_ext
