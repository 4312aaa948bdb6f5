// HostCopies: parts of a unit's parameters that ranks of other hosts own, and this rank keeps for its
// host.
//
// Owner:   one UnitParameters.
// Threads: called only under the engine's lock. Other ranks read its memory at any time.
//
// Note [Host copies]
// Stage 3's gathers are one-sided, so each rank takes each part from its owner: one network card
// sends a part to all ranks of another host. With host copies, those divide the parts of the other
// hosts among themselves, as in Note [Gathers by host]. An update sends a part once to each host, and
// gathers read the ranks of their own host.
// - A part may change between updates: a user writes to it, or a checkpoint is loaded. So its owner
//   has a byte that says whether its copies are equal to it, and each gather takes the bytes of all
//   owners on other hosts. If some part has changed, that gather takes all parts from their owners.
// - A byte is 0 from the moment that a view of the part is lent. It is 1 again after the next update
//   that sends the part while no view is lent any more.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "comm/comm.h"
#include "memory/flat_buffer.h"
#include "memory/rank_layout.h"
#include "units/unit_context.h"

namespace zero_ext {

class HostCopies {
 public:
  // `gather_tag`: of the parts themselves. `packs`: updates of this unit mark what they change.
  HostCopies(const UnitContext& context, const RankLayout& layout, at::ScalarType dtype,
             int64_t gather_tag, bool packs, const Comm& comm);

  // At first, where all ranks know the same values: `fill` writes a range there.
  void fill(const std::function<void(void* copy, int64_t range)>& fill);
  // This rank's part may not be what its copies are.
  void part_changed() { show(false); }

  // An update of any units begins. It may change this rank's part.
  void begin_update();
  // The update has changed the unit: sends `part`, and receives what this rank keeps. `marks`: of
  // what has changed in the part. Returns the bytes sent. Collective.
  int64_t send(Comm& comm, int64_t number, const at::Tensor& part, const uint16_t* marks,
               Pending& pending);
  // All that was sent has arrived. `lent`: somebody may be writing to the part.
  void end_update(bool lent);

  // Takes the parts of all other ranks, into `full`. First waits for the owners' bytes. `what`: as in
  // Pending::wait.
  void receive(Comm& comm, const FlatBuffer& full, Pending& pending,
               const std::function<std::string()>& what);
  // The last call took parts from owners on other hosts.
  bool reads_owners() const { return reads_owners_; }

  // What other ranks take from this one: a rank of another host, of its own host.
  PostedSend post_state(Comm& comm, int64_t peer) const;
  std::vector<PostedSend> post_copies(Comm& comm) const;

 private:
  void show(bool equal) { *equal_.mutable_data_ptr<bool>() = equal; }
  bool are_equal(Comm& comm, const std::function<std::string()>& what) const;

  const UnitContext& context_;
  const RankLayout& layout_;
  int64_t gather_tag_;
  bool packs_;
  std::map<int64_t, FlatBuffer> kept_;  // by range
  at::Tensor equal_;                    // bool [1]
  bool equal_before_ = false;           // the update under way
  bool sent_ = false;                   // by that update
  bool reads_owners_ = false;
};

}  // namespace zero_ext
