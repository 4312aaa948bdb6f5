// Agreements: small values that every rank needs from every other one before it goes on.
//
// Owner:   Comm, which is one.
// Threads: as Comm.
//
// They use the gather group, or that of reductions (agree_beside_gathers). Between ranks of
// one host values on the host use neither. Each waits until all ranks have taken part.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "comm/peers.h"

namespace zero_ext {

enum class Agreement : int64_t {
  local_peers,
  step,
  reduction_order,
  clip,
  shards,
  whole_parameters,
  unfreezing,
  clip_value,
};
// The call in which ranks agree on this.
const char* name_of(Agreement about);

class Agreements : public Peers {
 public:
  using Peers::Peers;

  // From now on agreements on a device use the group of reductions. A rank may be in a gather of
  // stage 3 while another one is in an agreement: one group would take the one for the other.
  void agree_beside_gathers() { among_ = MessageKind::reduction; }
  // int64 [n] of each rank, on the host or on the device → [world, n]. `what`: as in Pending::wait.
  // Raises on all ranks where they are in different agreements, except on a device, where the
  // values are not read.
  // `meanwhile`: as below; then `values` are on the host.
  at::Tensor all_gather(Agreement about, const at::Tensor& values,
                        const std::function<std::string()>& what, const Meanwhile& meanwhile = {});
  // The same of values that `meanwhile` may change: this rank does there what other ranks wait for
  // that are not in the agreement yet. Where the answers differ in element `state`, some of them may
  // be older than that. Then the result is undefined on every rank. All ranks have come then, so
  // that the next answers are the last ones. `values` are on the host.
  at::Tensor all_gather_unless_outdated(Agreement about, const at::Tensor& values, int64_t state,
                                        const std::function<std::string()>& what,
                                        const Meanwhile& meanwhile);

 private:
  at::Tensor gather_values(const at::Tensor& values, const std::function<std::string()>& what,
                           const Meanwhile& meanwhile);
  // Between local peers, rank by rank; else by the process group.
  void start(const at::Tensor& input, const at::Tensor& output,
             const std::function<std::string()>& what, Pending& pending);
  // These values travel by the device's backend.
  bool by_device(const at::Tensor& values) const {
    return way().queued && !(values.is_cpu() && way().one_host);
  }

  MessageKind among_ = MessageKind::gather;  // of a device's values
  int64_t epoch_ = 0;                        // the last one
  bool unfinished_ = false;  // between hosts the last one failed, and its message is under way
};

}  // namespace zero_ext
