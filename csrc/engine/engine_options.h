// EngineOptions: what an engine is made with. Constant from then on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "gather/gatherer.h"
#include "units/unit_context.h"

namespace zero_ext {

struct EngineOptions {
  int stage = 1;
  c10::Device device = c10::kCPU;     // of the parameters
  bool offload = false;               // what an update needs lies in host memory
  bool offload_parameters = false;    // stage 3's lie there between their uses
  bool pin_memory = true;             // of what is offloaded
  std::string reduce_group;           // names of process groups; both empty: one rank alone
  std::string gather_group;           //
  std::vector<int64_t> global_ranks;  // of the groups' ranks, see Comm
  std::string within_reduce_group;    // see Comm::Names; empty: all ranks are one replica
  std::string within_gather_group;
  std::string across_group;
  std::vector<int64_t> expert_places;  // of the ranks with the same experts, in the groups; rise
  std::string expert_reduce_group;     // theirs, on a device
  std::string expert_gather_group;
  int64_t timeout_ms = 0;  // of messages without a process group, and of watched ones
  int64_t host = 1;        // see SharedHostTransport::connect
  Reduction reduction = Reduction::exchange;
  bool default_reduction = false;  // then exchange, wherever devices read each other's memory
  std::optional<at::ScalarType> reduce_dtype;
  bool host_copies = false;        // stage 3, on the host: see Note [Host copies] in host_copies.h
  int64_t window_bytes = 0;        // see Note [Windows] in unit_reduction.h
  double divide_factor = 0;        // gradients are divided by it; 0: by the number of ranks
  int64_t accumulation_steps = 1;  // every n-th backward is a boundary
  bool broadcast = true;           // all ranks begin with rank 0's parameter values
  int64_t limit_bytes = std::numeric_limits<int64_t>::max();
  GatherOptions gather;
};

}  // namespace zero_ext
