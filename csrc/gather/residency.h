// Residency: whether a unit's full parameters are in memory, and what keeps them there. A pure
// function of state, holds and event; it knows no tensors, no ranks and no stages.
//
// Note [When may a unit be released?]
// A unit is released when nothing holds it:
// - no forward is inside it, and every call that the backward entered was left;
// - no gradient of it is expected, and its graph is not kept;
// - the user has no view of it and does not hold it (unshard()).
// This is checked at each event. The end of a backward closes all calls.
// The last gradient is too early: with a frozen weight beside a trainable one, or a weight that is
// also used detached, the backward reads the weight once more after it.
#pragma once

#include <cstdint>

namespace zero_ext {

enum class Residency : uint8_t { released, gathering, gathered };

enum class ResidencyEvent : uint8_t {
  prefetch,
  enter_forward,
  leave_forward,
  enter_backward,  // a call of the unit's module, as autograd comes back to it
  leave_backward,
  gradient,        // one of the unit's arrived
  backward_ended,  // the outermost one
  hold,            // the user's unshard()
  drop,            // the user's reshard()
  step,
  reset,  // after an exception: no forward or backward is inside any more
};

enum class ResidencyAction : uint8_t {
  none,
  start,    // allocate, start the gather
  gather,   // the same, and wait for it
  wait,     // for the gather under way
  release,  // wait for a gather under way, then free
  error,    // the event cannot happen in this state; nothing changes
};

struct Holds {
  int32_t forward = 0;     // forwards inside the unit
  int32_t calls = 0;       // calls that the backward entered and has not left
  bool graph = false;      // a backward over it kept its graph
  bool escaped = false;    // a forward returned views of it
  bool user = false;       // unshard()
  bool permanent = false;  // parameters are replicated
  bool operator==(const Holds&) const = default;
  bool any() const { return forward > 0 || calls > 0 || graph || escaped || user || permanent; }
};

// What the event brings with it.
struct ResidencyContext {
  bool keep = false;      // leave_forward: the next use comes at once, or has been asked for
  bool escapes = false;   // leave_forward: the output has views of the unit
  bool expected = false;  // gradients of the unit have yet to arrive in this backward
  bool graph_kept = false;
  bool may_retain = true;  // within the bound on what kept graphs hold
};

struct Transition {
  Residency state;
  Holds holds;
  ResidencyAction action;
};

Transition transition(Residency state, Holds holds, ResidencyEvent event,
                      const ResidencyContext& context);

}  // namespace zero_ext
