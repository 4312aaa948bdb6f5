// UnitReduction: one reduction of a unit's gradients: the message of this rank, what the other
// ranks sent, and their addition to the unit's sums.
//
// Owner:     Reductions, from the moment that the unit is lent a bucket until the contributions are
//            added, or the backward threw.
// Threads:   called only under the engine's lock.
// Invariant: the bucket is here from construction until finish() or abandon().
//
// Note [Windows]
// Without ranges, and over many replicas, what all ranks send to one rank grows with their number.
// So an exchange receives one window of this rank's range after the other, and adds it to the sums.
// A window is so short that all ranks' parts of it are at most as large as this rank's message, or
// as UnitContext::window_bytes. Each element is still added in rank order, so windows change no bit.
// start() exchanges the first window, finish() the others. Where the ranges of a unit are as many
// as the ranks, one window is enough.
//
// Note [Mixed messages]
// A rank in no_sync() sends fp32 sums. Another rank sends gradients in their own dtype, which may be
// shorter. gloo ends the process that receives more bytes than it expects. So messages in fp32 have
// another tag, and the flags say in which dtype each rank sends. Where some ranks send in fp32, the
// others turn their gradients into fp32, which changes no value, and send them once more.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "memory/bucket.h"
#include "units/unit.h"
#include "units/unit_context.h"

namespace zero_ext {

// Of one reduction: flags, gradients in their own dtype, gradients in fp32.
constexpr int64_t kReductionTags = 3;

constexpr char kOtherSteps[] =
    " has made steps with other backwards than this rank: one threw on some ranks alone, and their"
    " parameters differ. Continue from a checkpoint in a new process. With nonfinite='skip' or"
    " 'raise' step() raises instead.";

// The memory of a reduction that this rank will not finish. Other ranks may finish theirs with it.
struct AbandonedReduction {
  Pending pending;
  std::unique_ptr<Bucket> bucket;  // null where it used none
  std::vector<at::Tensor> flags;
  std::optional<c10::Event> copied = {};  // into the bucket's memory on the host
};

class UnitReduction {
 public:
  UnitReduction(Unit& unit, std::unique_ptr<Bucket> bucket)
      : context_(unit.ranks().context),
        comm_(unit.ranks().comm),
        unit_(unit),
        bucket_(std::move(bucket)) {}

  // Contributions bring flags that say which slots their rank used. Otherwise the ranks count the
  // users of each slot at the end of the backward, once for all units: a device's backend starts
  // few collectives faster than many, and the host needs no earlier answer.
  static bool brings_flags(const UnitContext& context, const Comm& comm) {
    return context.reduction == Reduction::exchange && comm.way().users == Users::flags;
  }

  const Unit& unit() const { return unit_; }
  // The unit's gradients go into the bucket from now on.
  void lend_message();
  // `late`: of each unit whether this rank has late gradients, which all ranks will have to reduce;
  // empty where this is not the last reduction of a backward.
  // `steps`: see Reductions::note_step_without_messages.
  void start(int64_t backward, int32_t steps, std::vector<uint8_t> late);
  // Waits and adds the ranks' contributions, times `scale`. Gives the bucket back.
  std::unique_ptr<Bucket> finish(float scale);
  // The same of any rank, when it is finished; where contributions bring flags.
  const std::vector<uint8_t>& late() const { return late_; }
  // The beginning of a message about this rank waiting for the reduction.
  std::string waiting() const;
  bool started() const { return unit_.arrivals().reduced(); }
  // The other ranks need nothing more from this one.
  bool sent_all() const { return window_.end() == range_numel(); }
  // The backward threw. What the other ranks may still need.
  AbandonedReduction abandon();

 private:
  // Elements of this rank's range, from its beginning.
  struct Window {
    int64_t begin = 0;
    int64_t numel = 0;
    int64_t end() const { return begin + numel; }
  };

  int64_t range_numel() const { return unit_.layout().range_numel(); }
  // How many ranks' parts of a window are received.
  int64_t places() const { return context_.offloads() ? context_.world : context_.world - 1; }
  // The window that begins at an element.
  Window window_from(int64_t begin) const;
  void start_window(Window window);
  void start_exchange();
  void start_pulled();
  bool pulls() const {
    return context_.reduction == Reduction::exchange && comm_.way().sums == Sums::pulled;
  }
  // Other ranks may fill the slot again, once what this one has queued is done.
  void leave_slot();
  void exchange_flags(int64_t tag);
  void start_collective();
  // A power of two by which a message in fp16 is divided between its rounding and the sum of all
  // ranks, so that the sum has room wherever the mean has. Exact, except for subnormal values.
  float headroom() const;
  // Queues a copy to the host of the contributions that lie on the device, where sums are
  // offloaded.
  void send_to_host();
  void wait(Pending& pending);
  void check_flags();
  // See Note [Mixed messages].
  void send_in_fp32_if_others_do();
  bool knows_users() const { return !flags_.empty(); }
  bool may_be_used_by(int64_t source, int64_t i) const;
  bool is_used(int64_t i) const;
  // Until the host has what send_to_host() copies there.
  void await_copies() const;
  // What can be added in one call.
  std::vector<Run> runs() const;
  void add_window(const std::vector<Run>& runs, float scale);
  // `run`: inside the window.
  void add_run(const Run& run, float scale);

  const UnitContext& context_;
  Comm& comm_;
  Unit& unit_;
  std::unique_ptr<Bucket> bucket_;
  at::Tensor message_;  // [padded], in the bucket: this rank's gradients
  int64_t backward_ = 0;
  int32_t steps_ = 0;
  std::vector<uint8_t> late_;
  Window window_;  // the one under way
  Pending pending_;
  Pending pending_flags_;
  std::vector<at::Tensor> flags_;    // [world] messages of bytes, where contributions bring them
  std::vector<at::Tensor> sources_;  // contributions to the window, in rank order
  std::optional<c10::Event> sent_to_host_;
  std::optional<int64_t> slot_;  // of PeerMemory, from the start on
};

}  // namespace zero_ext
