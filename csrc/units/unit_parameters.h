// UnitParameters: a unit's parameters and their masters: the whole parameters (full), this rank's
// range of them (shard) and of the masters (master), and gathers under way.
//
// Owner:     one Unit.
// Threads:   called only under the engine's lock.
// Invariant: full, shard and master share the unit's layout; what the user writes to a parameter
//            reaches its master before the parameter is released or stepped.
//
// Note [Released parameters]
// Where full comes and goes, this rank's range of the parameters stays in memory, in shard.
// On a device the master replaces the shard: it has all the bits, and a gather must copy the range
// anyway. A gather casts the master, and a release puts what the user wrote to the parameters into
// the master. A single rank then releases its parameters too, and holds no more than the masters.
// Such a unit has a shard only while it is needed: while views of it are lent, or while the master
// is offloaded and the parameters are not.
// On the host a shard costs 2 bytes per element, and saves other ranks from reading 4.
// Where the other ranks' devices read it in place, a device has a shard, too: Note [Pulled gathers].
// A device's shard may lie on the host as well, see Note [Offload].
//
// A gather fills memory of its own, which becomes that of full when all of it has arrived. So a
// forward that reads a parameter of a unit that it does not enter gets an error until then, as for a
// released one, and no value that is still on its way.
//
// Note [Writes to a lent shard]
// state_dict() lends views of the shard on every rank, whether full has memory or not, and users may
// write to both. While full has memory and views are lent, lent_before_ holds the shard as it was
// when both were equal. A release keeps the elements of the shard that differ from it, and takes all
// others from full. The memory of lent views never changes, so that other threads may read it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "device/streams.h"
#include "memory/flat_buffer.h"
#include "memory/rank_layout.h"
#include "units/host_copies.h"
#include "units/unit_context.h"
#include "units/written_values.h"

namespace zero_ext {

// Whether the user's writes to parameters survive their release.
enum class Writes { keep, discard };

class UnitParameters {
 public:
  // `values`: the parameters' present values, in any one floating dtype. `dtype`: what they are
  // computed in. `layout`, `name`: the unit's, which outlive this. `gather_tag`: of its messages.
  UnitParameters(const UnitContext& context, const RankLayout& layout, const std::string& name,
                 at::ScalarType dtype, UnitKind kind, int64_t gather_tag,
                 const std::vector<at::Tensor>& values, Comm& comm, bool broadcast);

  // What users wrote to the parameters, which watch() names.
  friend WrittenValues& written_of(UnitParameters& unit) { return unit.written_; }
  // Whether other hosts get only what an update has changed, see changed_part.h.
  friend bool sends_changes(const UnitParameters& unit) { return unit.sends_changes_; }
  // Null where there are none.
  friend HostCopies* copies_of(const UnitParameters& unit) { return unit.copies_.get(); }
  // What these are copies of.
  friend const FlatBuffer& shard_of(const UnitParameters& unit) { return unit.shard_; }

  // Slot i in its parameter's shape, over full.
  at::Tensor view(int64_t i) const;
  bool owns_storage_of(const at::Tensor& tensor) const;
  // This rank's part of slot i, 1-D: of the master; of the shard, where full comes and goes; of
  // what the parameter itself holds now.
  at::Tensor master_slice(int64_t i) const;
  at::Tensor shard_slice(int64_t i);
  at::Tensor present_slice(int64_t i) const;
  // Copies master, with the values that were written to the parameter since, into `into`: 1-D, of
  // any dtype and device.
  void copy_master(int64_t i, const at::Tensor& written, const at::Tensor& into) const;
  // The user replaced the parameter's storage: its values become `values`.
  void adopt(int64_t i, const at::Tensor& values);
  // Brings master up to date with what was written to the parameters.
  void adopt_writes();

  // What an update works on: the master's range, and this rank's range of the parameters in their
  // compute dtype. The second is null where an update writes the master alone.
  float* master_data() const;
  void* stepped() const;
  // Around an update, where states are offloaded: starts the copy of this rank's parameters to the
  // host, waits for it, copies them back.
  void begin_update();
  void await_update();
  void end_update();
  // After an update, where full stays: sends every rank's range to all. `marks`: of what the update
  // has changed, where sends_changes(*this). Returns the bytes sent to other hosts.
  int64_t gather(Comm& comm, int64_t tag, Pending& pending, const uint16_t* marks);

  // Full comes and goes, see Note [Released parameters]. The functions below are for such units.
  bool comes_and_goes() const { return comes_and_goes_; }
  // This rank's range, for `peer` to take whenever it gathers the unit.
  PostedSend post_send(Comm& comm, int64_t peer) const;
  // Where full has memory, what was written there is forgotten. `number`: of the unit, the same on
  // every rank, here and below. `what`: as in Pending::wait.
  void start_gather(Comm& comm, int64_t number, const std::function<std::string()>& what);
  // Copies slot i, whole, from full into `flat`, 1-D in its memory order; where full is released,
  // starts to read it from the shards.
  void read_slot(Comm& comm, int64_t i, const at::Tensor& flat, Pending& pending);
  void finish_gather(const std::function<std::string()>& what);
  // Takes part in a gather of the other ranks by a device's backend, into memory of its own. Waits on
  // the device for `since` alone.
  void serve_gather(Comm& comm, int64_t number, const StreamEvent& since,
                    const std::function<std::string()>& what);
  // Frees full. With Writes::keep, shard or master first adopts what the user wrote into this
  // rank's range.
  void release(Comm& comm, Writes writes);
  // Where parameters travel through host memory: the copy there becomes this rank's present range.
  void refresh_mirror(const Comm& comm);

  // See FlatBuffer::offload and reload: what is among `states` of "full" and "master".
  void offload(const std::set<std::string>& states, const std::string& message);
  void reload();
  // For a unit that is not used any more.
  void drop_master() { master_.drop(); }

 private:
  void take(const std::vector<at::Tensor>& values, Comm& comm, bool broadcast);
  // This rank's range of the parameters where it always has memory: in shard or in full; null where
  // neither has.
  char* own_parameters() const;
  void receive_ranges(Comm& comm, int64_t number, const std::function<std::string()>& what);
  // Where a gather writes.
  const FlatBuffer& gathered() const { return arriving_.defined() ? arriving_ : full_; }
  // Finishes the gather under way, if there is one.
  void settle_gather();
  void bring_own_range();
  void copy_own_range(void* into) const;
  // Where the shard is on the host, `beside` makes the side stream of gathers the current one.
  void go_beside(std::optional<SideStream::Scope>& beside) const;
  // Until a shard on the host has what releases copy into it.
  void await_releases() const;
  void adopt_into_master(const void* parameters, float* master, int64_t numel) const;
  void cast_master(void* parameters) const;
  // See Note [Writes to a lent shard].
  void remember_lent_shard();
  at::Tensor own_range_with_lent_writes() const;
  void copy_own_range_to_shard();
  // Its values may be others from now on than other hosts keep.
  void part_changes() const {
    if (copies_ != nullptr) copies_->part_changed();
  }
  void need_shard();
  // Drops the shard unless views of it are held; the master adopts what was written to it.
  void drop_idle_shard();

  const UnitContext& context_;
  const RankLayout& layout_;
  const std::string& name_;
  at::ScalarType dtype_;
  int64_t gather_tag_;
  std::string released_message_;  // what a read raises while full is released
  bool casts_master_;
  bool on_host_;  // the shard of a device's parameters
  bool comes_and_goes_;
  bool sends_changes_;
  FlatBuffer full_;      // [padded], compute dtype; without memory while the unit is released
  FlatBuffer arriving_;  // the memory of full, until a gather of a released unit has ended
  FlatBuffer shard_;     // [range], compute dtype; undefined where full always holds it, and mostly
                         // where casts_master_
  std::unique_ptr<HostCopies> copies_;  // null where there are none
  at::Tensor mirror_;  // of a shard on a device, on the host, where it travels through host memory
  bool shard_shown_ = false;  // views of the shard were lent
  FlatBuffer lent_before_;    // [range], compute dtype; see Note [Writes to a lent shard]
  FlatBuffer master_;   // [range], fp32; undefined where own_parameters() are fp32 and serve as it
  FlatBuffer updated_;  // [range], compute dtype; own_parameters() on the host, around an update
  std::optional<c10::Event> downloaded_;  // into updated_
  std::optional<StreamEvent> own_range_;  // has reached full, in the last gather
  Pending gathering_;
  WrittenValues written_;
};

}  // namespace zero_ext
