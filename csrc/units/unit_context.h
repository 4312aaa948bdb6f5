// UnitContext: what all units of an engine share.
//
// Owner:     Engine. Constant once its first unit exists.
//
// Note [Offload]
// With an offload policy, masters, sums and optimizer states lie in pinned host memory, and the
// CPU's kernels work on them. When a unit is complete, a copy of its gradients to the host is
// queued behind its reduction; the host adds it when it waits for the reduction. Parameters are
// copied to the host before their update, which must see what the user wrote to them, and back
// after it.
// Stage 3's shards may lie there, too. Then each gather copies this rank's range to the device, and
// each release copies it back, because the user may have written to it. Both are queued on the side
// stream of gathers, from which such a unit has its memory: what computes waits for neither, except
// for the gathers that it needs. The update works on the shards themselves. Without offloaded
// masters this is for frozen units alone: the others are gathered from their masters.
//
// Note [Replicas]
// With hybrid sharding (HSDP) there are fewer ranges than ranks. Ranks r * shards … (r + 1) *
// shards - 1 are replica r. They hold one copy between them: rank k of the replica holds range k.
// Gathers stay within a replica, and the parts of its ranks make up a norm. Reductions are over all
// ranks. By exchange, the owner of a range in each replica gets every rank's contribution to it. So
// it has the sum of all ranks in rank order, with the same bits in all replicas. A collective
// reduces in each replica, then over the owners of the same range.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <memory>

#include "core/policy.h"
#include "device/kernel_table.h"
#include "device/streams.h"
#include "memory/flat_buffer.h"

namespace zero_ext {

enum class Reduction {
  exchange,    // all-to-all, then one fp32 sum in rank order: exact, reproducible
  collective,  // the backend's reduce-scatter in reduce_dtype
};

// A frozen unit has only parameters: no master, no gradient, no reduction.
enum class UnitKind { trainable, resident, frozen };  // resident: trained, and never released

class NanRecords;

struct UnitContext {
  KernelTable compute{};            // of parameters and gradients
  KernelTable state{};              // of masters, sums and optimizer states
  bool pinned = true;               // the host memory of what is offloaded
  bool parameters_on_host = false;  // shards, between their uses on a device
  bool shows_shards = false;        // other ranks' devices read them, see peer_memory.h
  SideStream reducing{};            // beside the backward
  SideStream gathering{};           // beside whatever computes
  NanRecords* nan_records = nullptr;
  int64_t rank = 0;
  int64_t world = 1;
  int64_t shards = 1;                 // ranks of a replica, see Note [Replicas]
  int64_t global_rank = 0;            // this rank's number in error messages
  std::vector<int64_t> global_ranks;  // all ranks' numbers there, see Comm
  Policy policy;
  Reduction reduction = Reduction::exchange;
  at::ScalarType reduce_dtype = at::kFloat;  // of collective reductions
  bool reduce_in_gradient_dtype = true;      // of exchange: else in reduce_dtype
  int64_t subset = -1;  // the first of the ranks that hold the same experts; -1: there are none
  bool host_copies = false;  // see Note [Host copies] in host_copies.h
  int64_t window_bytes = 0;  // see Note [Windows] in unit_reduction.h
  std::shared_ptr<MemoryCounter> memory;
  std::shared_ptr<SpareMemory> spare{};      // of released parameters
  std::shared_ptr<MemoryCounter> offloaded;  // counts the host memory of offloaded states
  // Other ranks need this one's part of the parameters.
  bool shards_parameters() const { return policy.release == When::after_use && shards > 1; }
  int64_t first_of_replica() const { return rank - rank % shards; }
  bool shares_replica_with(int64_t peer) const { return peer / shards == rank / shards; }
  // See Note [Released parameters] in unit_parameters.h.
  bool casts_masters(at::ScalarType dtype) const {
    return policy.release == When::after_use && !compute.on_host() && !offloads() &&
           !shows_shards && dtype != at::kFloat;
  }
  bool offloads() const { return compute.device() != state.device(); }
  bool offloads_shard(UnitKind kind) const {
    return parameters_on_host && (kind == UnitKind::frozen || offloads());
  }
  Place compute_place() const { return {.device = compute.device()}; }
  Place host_place() const { return {.pinned_for = pinned ? compute.device().type() : c10::kCPU}; }
  Place state_place() const { return offloads() ? host_place() : compute_place(); }
  const std::shared_ptr<MemoryCounter>& state_memory() const {
    return offloads() ? offloaded : memory;
  }
  // Memory that is not counted.
  at::Tensor on_device(int64_t numel, at::ScalarType dtype) const {
    return at::empty({numel}, at::TensorOptions().dtype(dtype).device(compute.device()));
  }
  // A buffer of what an update needs, where masters, sums and states lie.
  FlatBuffer state_buffer(Held held, at::ScalarType dtype, int64_t numel) const {
    return {state_memory(), held, state_place(), dtype, numel};
  }
};

}  // namespace zero_ext
