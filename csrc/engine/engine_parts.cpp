#include "engine/engine_parts.h"

#include <c10/util/StringUtil.h>

#include <chrono>
#include <utility>

#include "core/errors.h"
#include "core/torch_internals.h"

namespace zero_ext {
namespace {

const Policy& policy_for(int stage) {
  const Policy* policy = find_policy(stage);
  TORCH_CHECK_VALUE(policy != nullptr, "zero_ext has stages 0, 1, 2 and 3, not ", stage,
                    ". Stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the "
                    "parameters as well.");
  return *policy;
}

// Where updates run: on the host with offload.
KernelTable state_kernels(const EngineOptions& options) {
  return KernelTable(options.offload ? c10::Device(c10::kCPU) : options.device);
}

Comm make_comm(const EngineOptions& options) {
  if (options.reduce_group.empty()) return Comm(options.global_ranks);
  return Comm({.reduce = options.reduce_group,
               .gather = options.gather_group,
               .within_reduce = options.within_reduce_group,
               .within_gather = options.within_gather_group,
               .across = options.across_group},
              options.device, options.global_ranks);
}

}  // namespace

void Access::enter_device(EngineLock& lock, Failures failures) {
  device_.reset_device(lock.device_);
  if (failures == Failures::reported) {
    if (lock.backward_stream_.has_value()) stream_.reset_stream(*lock.backward_stream_);
  } else if (current_task() != -1) {
    lock.backward_stream_ = current_stream(lock.device_);
  }
}

void OffloadedStates::check(bool here, const char* verb) const {
  TORCH_CHECK(here, where(rank_), verb, ": ", c10::Join(", ", names_),
              " of this model are offloaded. Call zero_ext.reload_states() first.");
}

void OffloadedStates::check_forward() const {
  TORCH_CHECK(!contain("full"), where(rank_),
              "forward: the parameters of this model are offloaded."
              " Call zero_ext.reload_states() first.");
}

EngineParts::EngineParts(EngineOptions given)
    : options(std::move(given)),
      last_use(options.device),
      comm(make_comm(options)),
      lock(options.device, comm.global_rank()),
      offloaded(comm.global_rank()),
      nan_records(KernelTable(options.device), state_kernels(options), comm.rank()),
      context{.compute = KernelTable(options.device),
              .state = state_kernels(options),
              .pinned = options.pin_memory,
              .parameters_on_host = options.offload_parameters,
              .reducing = SideStream(options.device),
              .gathering = SideStream(options.device),
              .nan_records = &nan_records,
              .rank = comm.rank(),
              .world = comm.world(),
              .shards = comm.shards(),
              .global_rank = comm.global_rank(),
              .global_ranks = options.global_ranks,
              .policy = policy_for(options.stage),
              .reduction = options.reduction,
              .reduce_dtype = options.reduce_dtype.value_or(at::kFloat),
              .reduce_in_gradient_dtype = !options.reduce_dtype.has_value(),
              .window_bytes = options.window_bytes,
              .memory = std::make_shared<MemoryCounter>(options.limit_bytes),
              .offloaded = std::make_shared<MemoryCounter>()},
      parameters(context),
      published(parameters, nan_records, finished, context.global_rank, context.world),
      reductions(comm, context, parameters, finished),
      agreement(comm, context, parameters, finished),
      boundary({.world = comm.world(),
                .sums_locally = context.policy.reduce == When::at_boundary && !context.offloads(),
                .accumulation_steps = options.accumulation_steps,
                .divide_factor = options.divide_factor}),
      gatherer(comm, context, backward_phase, options.gather) {
  const std::chrono::milliseconds timeout(options.timeout_ms);
  comm.watch_collectives(timeout);
  comm.connect_local_peers(timeout, options.shared_host_transport);
  if (comm.on_device() && context.shards_parameters()) {
    comm.agree_beside_gathers();
    comm.compare_gathers();
  }
  context.spare =
      std::make_shared<SpareMemory>(context.memory, Held::full, context.compute_place());
}

Unit::Ranks EngineParts::ranks_of(const std::vector<int64_t>& places) {
  if (places.empty()) return {.context = context, .comm = comm};
  const auto found = subsets.find(places);
  if (found != subsets.end()) return {.context = found->second.context, .comm = found->second.comm};
  TORCH_CHECK(context.reduction == Reduction::exchange && context.shards == context.world,
              where(context.global_rank), "subsets of the ranks exchange, and have no replicas.");
  Subset& made = subsets.emplace(places, Subset{Comm(comm, places), context}).first->second;
  made.context.rank = made.comm.rank();
  made.context.world = made.context.shards = made.comm.world();
  made.context.global_ranks.clear();
  for (const int64_t k : places) made.context.global_ranks.push_back(comm.global_rank(k));
  return {.context = made.context, .comm = made.comm};
}

}  // namespace zero_ext
