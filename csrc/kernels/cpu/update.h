// The loop of every elementwise update on the CPU. `Element`, M: see updates.h.
#pragma once

#include <utility>

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/changes.h"
#include "kernels/updates.h"

namespace zero_ext::kernels {

template <class T, class M, class Element>
struct Update {
  using States = std::make_integer_sequence<int, Element::kStates>;

  Element element;
  float* master;
  T* param;
  const float* grad;
  M* states[3];
  Changes changes;
  bool ahead;

  ZERO_EXT_BODY void operator()(const UpdateSegment& segment, int64_t begin, int64_t end) const {
    Update own = *this;
    own.master += segment.begin;
    if constexpr (kHasParam<T>) own.param += segment.begin;
    own.grad += segment.begin;
    for (int s = 0; s < Element::kStates; ++s) own.states[s] += segment.states;
    own.changes.first += segment.begin;
    if constexpr (kMarks<T>) {
      if (changes.words != nullptr) return own.update_marked(begin, end, States());
    }
    if (ahead) {
      own.update_fetched(begin, end, States());
    } else {
      own.update(begin, end, States());
    }
  }

  template <int... s>
  ZERO_EXT_BODY void update_fetched(int64_t begin, int64_t end,
                                    std::integer_sequence<int, s...> all) const {
    const auto visit = [&](int64_t i, int64_t n) ZERO_EXT_BODY_LAMBDA { update(i, i + n, all); };
    if constexpr (kHasParam<T>) {
      for_each_fetched_block(begin, end, visit, grad, master, states[s]..., param);
    } else {
      for_each_fetched_block(begin, end, visit, grad, master, states[s]...);
    }
  }

  template <int... s>
  ZERO_EXT_BODY void update_marked(int64_t begin, int64_t end,
                                   std::integer_sequence<int, s...> all) const {
    const auto visit = [&](int64_t i, int64_t n, uint16_t* differing)
                           ZERO_EXT_BODY_LAMBDA { update<true>(i, i + n, all, differing); };
    mark_blocks(changes, begin, end, ahead, visit, grad, master, states[s]..., param);
  }

  // `differing`: of the elements from `begin` on; not 0 where their bits have changed.
  template <bool marks = false, int... s>
  ZERO_EXT_BODY void update(int64_t begin, int64_t end, std::integer_sequence<int, s...>,
                            uint16_t* differing = nullptr) const {
    const Element own = element;
#pragma GCC ivdep
    for (int64_t i = begin; i < end; ++i) {
      float p = master[i];
      uint32_t old[2] = {};
      if constexpr (marks) {
        old[0] = rounded_bits<T>(p);
        old[1] = bits_of(param[i]);
      }
      if constexpr (kHasParam<T>) p = written_or_master(param[i], p);
      float state[] = {to_float(states[s][i])..., 0};
      const float g = own.advance(grad[i], p, state);
      ((states[s][i] = stored<M>(state[s], step_of(own.k))), ...);
      p = own.applied(g, p, state);
      master[i] = p;
      if constexpr (marks) {
        differing[i - begin] = differs_from(old, rounded_bits<T>(p));
      }
      if constexpr (kHasParam<T>) param[i] = from_float<T>(p);
    }
  }
};

template <class Args>
Status run_update(const Args& args, const Launch& launch) {
  return with_update(args, [&]<class T, class M, class Element>() {
    const auto state = [&](int s) { return static_cast<M*>(state_of(args, s)); };
    const Update<T, M, Element> update{{constants_of(args)},           args.master,
                                       static_cast<T*>(args.param),    args.grad,
                                       {state(0), state(1), state(2)}, {.words = args.changed},
                                       fetches_ahead(FetchAhead::all)};
    return with_segments(args, [&](const UpdateSegment* segments, int64_t count) {
      return run_list(launch, segments, count, update);
    });
  });
}

}  // namespace zero_ext::kernels
