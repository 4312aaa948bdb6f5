// Way: how ranks exchange what, as a table. The only place that knows which way does what.
#pragma once

#include <array>

namespace zero_ext {

// What carries tensors of the model's device between ranks.
enum class Carrier {
  host,     // they are on the host
  staged,   // copies of them on the host, because the groups have no backend for the device
  backend,  // the device's own backend, queued on the device's streams
};

// How the parameters of released units come to a rank.
enum class Gathers {
  posted,      // one-sided: each rank posts its part anew for each pass
  persistent,  // one-sided: each rank posts its part once, and others read it at any time
  collective,  // all ranks gather the same units in the same order
  pulled       // one-sided: each rank reads the others' parts in place, see peer_memory.h
};

// How ranks learn which slots some rank has used in a reduction.
enum class Users {
  flags,  // with each contribution
  counts  // once, at the end of the backward
};

// How a rank learns that another one has begun a backward.
enum class Begun {
  epochs,   // it reads the other ranks' epochs
  notices,  // they send notices
  unknown,  // it does not: all ranks must run the same backwards
};

// How the gradients of a range come to its owner, where ranks exchange them.
enum class Sums {
  sent,   // by each rank
  pulled  // the owner reads them in place, see peer_memory.h
};

// What ranks read in the memory of each other's devices.
enum class Direct { nothing, gradients, all };

struct Way {
  bool queued;    // on the device's streams: no rank's host waits for another one in a backward
  bool one_host;  // every rank reads every other one's host memory
  Gathers gathers;
  Users users;
  Begun begun;
  Sums sums = Sums::sent;
};

// clang-format off
constexpr std::array<Way, 6> kWays{{
    {.queued = false, .one_host = false,
     .gathers = Gathers::posted,     .users = Users::flags,  .begun = Begun::notices},
    {.queued = false, .one_host = true,
     .gathers = Gathers::persistent, .users = Users::flags,  .begun = Begun::epochs},
    {.queued = true,  .one_host = false,
     .gathers = Gathers::collective, .users = Users::counts, .begun = Begun::unknown},
    {.queued = true,  .one_host = true,
     .gathers = Gathers::collective, .users = Users::counts, .begun = Begun::epochs},
    {.queued = true,  .one_host = true,
     .gathers = Gathers::collective, .users = Users::counts, .begun = Begun::epochs,
     .sums = Sums::pulled},
    {.queued = true,  .one_host = true,
     .gathers = Gathers::pulled,     .users = Users::counts, .begun = Begun::epochs,
     .sums = Sums::pulled},
}};
// clang-format on

constexpr const Way& way_of(bool queued, bool one_host, Direct direct) {
  if (direct != Direct::nothing) return kWays[3 + static_cast<int>(direct)];
  return kWays[2 * static_cast<int>(queued) + static_cast<int>(one_host)];
}

}  // namespace zero_ext
