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
              .subset = options.expert_places.empty() ? -1 : options.expert_places.front(),
              .host_copies = options.host_copies && options.stage == 3,
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
  comm.connect_local_peers(timeout, options.host);
  if (options.default_reduction || options.reduction == Reduction::exchange) {
    // Experts have gathers of their own, and a shard on the host is in nobody's device's memory.
    const bool gathers =
        context.shards_parameters() && !options.offload_parameters && options.expert_places.empty();
    comm.connect_devices(timeout, gathers ? Direct::all : Direct::gradients);
  }
  context.shows_shards = comm.way().gathers == Gathers::pulled;
  if (options.default_reduction && comm.way().sums == Sums::pulled)
    context.reduction = Reduction::exchange;
  if (comm.way().gathers == Gathers::collective && context.shards_parameters()) {
    comm.agree_beside_gathers();
    comm.compare_gathers();
  }
  context.spare =
      std::make_shared<SpareMemory>(context.memory, Held::full, context.compute_place());
  if (!options.expert_places.empty()) make_subset();
  comm.connect_backend(kinds_of(comm));
  if (of_experts != nullptr && !of_experts->comm.is_subset())
    of_experts->comm.connect_backend(kinds_of(of_experts->comm));
}

Comm::Kinds EngineParts::kinds_of(const Comm& ranks) const {
  const bool exchanges = context.reduction == Reduction::exchange;
  return {.exchanges = exchanges && ranks.way().sums == Sums::sent,
          .reduce_scatters = !exchanges,
          .gathers = context.shards_parameters() && ranks.way().gathers == Gathers::collective};
}

Unit::Ranks EngineParts::ranks_of(bool experts) {
  if (!experts) return {.context = context, .comm = comm, .places = no_places};
  TORCH_CHECK(of_experts != nullptr, where(context.global_rank),
              "no subset of the ranks is known.");
  return {
      .context = of_experts->context, .comm = of_experts->comm, .places = options.expert_places};
}

void EngineParts::make_subset() {
  const std::vector<int64_t>& places = options.expert_places;
  std::vector<int64_t> ranks;
  for (const int64_t k : places) ranks.push_back(comm.global_rank(k));
  of_experts = std::make_unique<Subset>(Subset{subset_comm(ranks), context});
  UnitContext& of_subset = of_experts->context;
  of_subset.rank = of_experts->comm.rank();
  of_subset.world = of_subset.shards = std::ssize(places);
  of_subset.global_ranks = ranks;
}

Comm EngineParts::subset_comm(const std::vector<int64_t>& ranks) const {
  if (!comm.way().queued) return Comm(comm, options.expert_places);
  if (ranks.size() == 1) return Comm(ranks);
  Comm own({.reduce = options.expert_reduce_group, .gather = options.expert_gather_group},
           options.device, ranks);
  own.join_watch_of(comm);
  return own;
}

}  // namespace zero_ext
