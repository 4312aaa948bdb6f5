// PassOrder: the order in which passes enter units. The last pass of a kind foretells the next one.
//
// Owner:   Gatherer.
// Threads: called only under the engine's lock.
// Torch-free: units are numbers here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zero_ext {

// A root forward, or a backward with all that it recomputes.
enum class Pass { forward, backward };

class PassOrder {
 public:
  // A pass that never ended is forgotten. The first backward is foretold as the reverse of the last
  // forward.
  void begin(Pass pass);
  // Has no effect outside of a pass of this kind.
  void enter(Pass pass, int64_t unit);
  void end(Pass pass);

  // The units that the last pass entered after the one that this pass has entered last. Empty
  // outside of a pass. Valid until the next call of a function that is not const.
  std::span<const int64_t> upcoming(Pass pass) const;
  // Whether the last forward entered `unit` last, after others.
  bool ends_forward(int64_t unit) const;
  // As before the first pass.
  void forget() { sequences_ = {}; }

 private:
  struct Sequence {
    std::vector<int64_t> last;     // units, as the last pass entered them
    std::vector<int64_t> current;  // as this pass has entered them so far
    size_t position = 0;           // in `last`: what comes next
    bool under_way = false;
  };
  Sequence& of(Pass pass) { return sequences_[static_cast<size_t>(pass)]; }
  const Sequence& of(Pass pass) const { return sequences_[static_cast<size_t>(pass)]; }

  std::array<Sequence, 2> sequences_;
};

}  // namespace zero_ext
