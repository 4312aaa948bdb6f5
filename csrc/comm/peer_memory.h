// PeerMemory: memory of a device that every rank of a host reads in place.
//
// Owner:     Comm, of ranks that all have direct access to each other's devices.
// Threads:   as Comm. The device's work is queued on the current stream.
// Invariant: every rank reserves and keeps the same bytes, shows its slots and meets in one order.
//
// Note [Pulled sums]
// A rank's gradients lie in a slot. The owner of a range reads it in all ranks' slots, in rank order:
// nothing is received, and no backend takes part. Two words for each slot and rank say how far that
// rank is. They lie in the memory of the rank that waits for them:
//
//   filled   the rank's gradients of the slot's n-th reduction lie there
//   read     the rank has read what it needs of all ranks' slots for the n-th reduction
//
// A rank fills a slot again when all ranks have read it. The device counts the reductions itself, so
// that a captured graph can be replayed. A word also has the dtype of the gradients. No rank waits
// for ever: after the timeout the device goes on, and the next wait of the host names the rank.
//
// Note [Pulled gathers]
// A rank keeps its part of a unit's parameters in memory that the others read whenever they gather
// the unit: no rank takes part in another one's gather, and ranks may take different branches. The
// devices meet before a part is written, when the others have read it, and after it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "comm/message.h"
#include "device/kernel_table.h"
#include "device/streams.h"
#include "memory/flat_buffer.h"

namespace c10d {
class Store;
}

namespace zero_ext {

class PeerMemory : public std::enable_shared_from_this<PeerMemory> {
 public:
  static constexpr int64_t kSlots = 2;

  struct Ranks {
    int64_t rank;
    int64_t world;
    c10::Device device;
  };
  // `store`: of these ranks. Collective, on the host. Raises where a rank cannot read the memory of
  // another one.
  PeerMemory(Ranks ranks, const c10::intrusive_ptr<c10d::Store>& store,
             std::chrono::milliseconds timeout);
  // Torch can make such memory on `device`.
  static bool is_known_on(c10::Device device);

  // Each slot has room for `bytes` from now on; counted by `counter`. Collective, on the host, where
  // the slots become larger.
  void reserve(int64_t bytes, const std::shared_ptr<MemoryCounter>& counter);

  // The slot of the next reduction, for this rank's gradients: [numel] of `dtype`. The current
  // stream continues when all ranks have read what it had before.
  at::Tensor next(at::ScalarType dtype, int64_t numel);
  // This rank has filled that slot. Waiting for the message makes the current stream wait until all
  // ranks have filled theirs with gradients of `dtype`. Returns the slot as well.
  struct Filled {
    int64_t slot;
    Message message;
  };
  Filled show_filled(at::ScalarType dtype);
  // A part of `rank`'s slot, which may be read once the message was waited for.
  at::Tensor part(int64_t slot, int64_t rank, at::ScalarType dtype, int64_t begin,
                  int64_t numel) const;
  // All that this rank has queued to read in the slot's current reduction.
  void show_read(int64_t slot);

  // Memory of this rank, of which the others read what they gather under `tag`, while they have
  // theirs. Collective, on the host.
  c10::DataPtr keep(int64_t tag, int64_t bytes);
  // Copies what `rank` keeps under `tag`, from `offset` bytes on, into `into`.
  void read_kept(const at::Tensor& into, int64_t rank, int64_t tag, int64_t offset) const;
  // The current stream continues when every rank's has come to its meeting of this number.
  void meet();

  // The place of a rank that did not come in time, or came with another dtype; -1: none.
  struct Failure {
    int64_t rank = -1;
    bool other_dtype = false;
  };
  Failure failure() const;
  // The device waits for no rank any more.
  void stop();

 private:
  class Arrival;
  // Memory that the ranks have mapped.
  struct Arena {
    at::Tensor own;
    std::shared_ptr<const void> mapped;  // as long as this lives
    std::vector<char*> of_ranks;
  };
  Arena map(int64_t bytes);

  // Meetings have a number and words as slots have.
  static constexpr int64_t kMeetings = kSlots;
  static constexpr int64_t kNumbers = kSlots + 1;
  enum Word { kFilled, kRead };
  void show(Word word, int64_t slot, bool next, uint32_t tag);
  void await(Word word, int64_t slot, uint32_t tag);
  int64_t words_begin(Word word, int64_t slot) const;
  int64_t slot_begin(int64_t slot) const;
  char* own(int64_t byte) const;
  uint32_t* number_of(int64_t slot) const;

  const Ranks ranks_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const KernelTable table_;
  const std::chrono::milliseconds timeout_;
  at::Tensor failed_;  // int32 on the host, pinned: see kernels.h
  // Words, numbers of reductions and of meetings, then the slots.
  Arena arena_;
  std::shared_ptr<void> counted_;
  std::map<int64_t, std::weak_ptr<const Arena>> kept_;  // by tag
  int64_t slot_bytes_ = 0;
  int64_t maps_ = 0;  // so far, on every rank
  int64_t next_ = 0;  // slot
  // This rank has read what it needs of it: the last use of the slot's number on the device.
  std::array<std::optional<StreamEvent>, kSlots> left_;
};

}  // namespace zero_ext
