// Policy: what a stage shards and when each verb runs. The only place that knows stage numbers.
#pragma once

#include <array>
#include <cstdint>

namespace zero_ext {

// How a buffer lies over the ranks. Replicated is a shard of one range, so callers need no branch.
enum class Sharding { replicated, sharded };

// `shards`: of how many ranks each holds one range.
constexpr int64_t ranges_of(Sharding sharding, int64_t shards) {
  return sharding == Sharding::sharded ? shards : 1;
}

// When a verb (gather, release, reduce) runs.
enum class When {
  never,
  before_use,      // whenever a pass enters the unit
  after_use,       // whenever a pass has left it
  after_step,      // once per optimizer step
  at_boundary,     // in the backward that ends an accumulation, none inside no_sync()
  every_backward,  // in each backward, no_sync() or not
};

struct Policy {
  int stage;
  Sharding parameter;
  Sharding gradient;   // of the sum that lives between backwards
  Sharding optimizer;  // master, moments, and the reduced gradient that they are updated with
  When gather;
  When release;
  When reduce;
};

constexpr auto kReplicated = Sharding::replicated;
constexpr auto kSharded = Sharding::sharded;

// clang-format off
constexpr std::array<Policy, 4> kStages{{
    {.stage = 0, .parameter = kReplicated, .gradient = kReplicated, .optimizer = kReplicated,
     .gather = When::never,      .release = When::never,     .reduce = When::at_boundary},
    {.stage = 1, .parameter = kReplicated, .gradient = kReplicated, .optimizer = kSharded,
     .gather = When::after_step, .release = When::never,     .reduce = When::at_boundary},
    {.stage = 2, .parameter = kReplicated, .gradient = kSharded,    .optimizer = kSharded,
     .gather = When::after_step, .release = When::never,     .reduce = When::every_backward},
    {.stage = 3, .parameter = kSharded,    .gradient = kSharded,    .optimizer = kSharded,
     .gather = When::before_use, .release = When::after_use, .reduce = When::every_backward},
}};
// clang-format on

// The row of `stage`, or null where there is none.
constexpr const Policy* find_policy(int stage) {
  for (const Policy& row : kStages) {
    if (row.stage == stage) return &row;
  }
  return nullptr;
}

}  // namespace zero_ext
