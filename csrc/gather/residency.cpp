#include "gather/residency.h"

#include <algorithm>

namespace zero_ext {
namespace {

Transition error(Residency state, Holds holds) { return {state, holds, ResidencyAction::error}; }

// The parameters are needed now; `holds` counts that use already.
Transition need(Residency state, Holds holds) {
  switch (state) {
    case Residency::released:
      return {Residency::gathered, holds, ResidencyAction::gather};
    case Residency::gathering:
      return {Residency::gathered, holds, ResidencyAction::wait};
    case Residency::gathered:
      break;
  }
  return {state, holds, ResidencyAction::none};
}

Transition release_unless(bool kept, Residency state, Holds holds) {
  if (kept || holds.any() || state == Residency::released) {
    return {state, holds, ResidencyAction::none};
  }
  return {Residency::released, holds, ResidencyAction::release};
}

}  // namespace

Transition transition(Residency state, Holds holds, ResidencyEvent event,
                      const ResidencyContext& context) {
  switch (event) {
    case ResidencyEvent::prefetch:
      if (state != Residency::released) return {state, holds, ResidencyAction::none};
      return {Residency::gathering, holds, ResidencyAction::start};
    case ResidencyEvent::enter_forward:
      ++holds.forward;
      return need(state, holds);
    case ResidencyEvent::enter_backward:
      ++holds.calls;
      return need(state, holds);
    case ResidencyEvent::hold:
      holds.user = true;
      return need(state, holds);
    case ResidencyEvent::leave_forward:
      if (state != Residency::gathered || holds.forward == 0) return error(state, holds);
      --holds.forward;
      holds.escaped = holds.escaped || context.escapes;
      return release_unless(context.keep || context.expected, state, holds);
    case ResidencyEvent::leave_backward:
      holds.calls = std::max(holds.calls - 1, 0);
      [[fallthrough]];
    case ResidencyEvent::gradient:
      if (state != Residency::gathered) return {state, holds, ResidencyAction::none};
      holds.graph = context.graph_kept && context.may_retain;
      return release_unless(context.expected, state, holds);
    case ResidencyEvent::backward_ended:
      // A call that was not seen to end may be read again through the graph that is kept.
      holds.graph = holds.graph || (holds.calls > 0 && context.may_retain);
      holds.calls = 0;
      holds.escaped = false;
      // A backward that keeps no graph ends earlier graphs' holds, also on units that it did not reach.
      holds.graph = holds.graph && context.graph_kept;
      return release_unless(context.keep, state, holds);
    case ResidencyEvent::drop:
      holds.user = false;
      return release_unless(context.expected, state, holds);
    case ResidencyEvent::step:
      if (holds.forward > 0 || holds.calls > 0) return error(state, holds);
      [[fallthrough]];
    case ResidencyEvent::reset:
      holds = {.permanent = holds.permanent};
      return release_unless(false, state, holds);
  }
  return error(state, holds);
}

}  // namespace zero_ext
