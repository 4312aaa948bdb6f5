// BackwardPhase: whether a backward runs, and how far it is.
//
// Owner:     RunningBackward alone changes it. Others only ask.
// Threads:   under the engine's lock.
#pragma once

namespace zero_ext {

enum class BackwardPhase {
  none,
  reached,  // it has reached a parameter or a call: units are gathered for it
  open,     // its gradients are accumulated, too
};

}  // namespace zero_ext
