// Rejections: errors that name what differs between ranks, after a message has shown that something
// does. Each takes messages of its own, which no other step needs.
//
// Owner:   Steps.
// Threads: called only under the engine's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine_parts.h"

namespace zero_ext {

class Rejections : Facet {
 public:
  explicit Rejections(EngineParts& parts) : Facet(parts) {}

  // Raises for the first parameter that is among `unfrozen` on some ranks alone. Collective.
  void reject_uneven_unfreezing(const std::vector<int64_t>& unfrozen) const;
  // Raises for the first gradient that ranks have written otherwise. Collective.
  void reject_written(Comm::Agreement about, const std::vector<int64_t>& indices) const;
  // Raises for the first parameter of which ranks hold different values. Collective.
  void reject_values(Comm::Agreement about) const;
  // The same of both, of parameters that a subset of the ranks holds.
  void reject_subset(Comm::Agreement about) const;

 private:
  // Of what parameter i holds on this rank, or as all ranks' parts together. Collective.
  int64_t present_digest(int64_t i) const;
};

}  // namespace zero_ext
