// FinishedBackwards: which backwards have reduced their gradients since the last step, and the
// number that tells the messages of one reducing backward from those of another.
//
// Owner:     Engine. Reductions counts, StepAgreement compares the ranks.
// Threads:   called only under the engine's lock.
// Invariant: count() and which() are the same on every rank, except after a backward that threw on
//            some ranks only, or a zero_grad() after it.
//
// Note [Changed too early]
// Users change reduced gradients in place: torch's clip_grad_norm_ and GradScaler.unscale_ do. A
// rank that has changed them may yet take part in later backwards of other ranks, which it did not
// wait for. Sums of changed and unchanged gradients are wrong, and in stage 0 they differ between
// ranks. Then the step raises. Gradients of which no backward since the last step is a part may be
// changed: they are zeroed by hand, say. torch's clipping and unscaling count always: a rank without
// a gradient has none to change, and takes part in backwards that other ranks clip.
#pragma once

#include <c10/util/hash.h>

#include <cstddef>
#include <cstdint>

namespace zero_ext {

class FinishedBackwards {
 public:
  int64_t count() const { return count_; }
  // A hash of their numbers.
  int64_t which() const { return static_cast<int64_t>(which_); }
  // `backward`: its number, the same on every rank.
  void add(int64_t backward) {
    ++count_;
    which_ = c10::hash_combine(which_, c10::get_hash(backward));
    changed_ = false;
  }
  void clear() {
    count_ = 0;
    which_ = 0;
    changed_too_early_ = false;
  }

  // This rank gave up the backward of that epoch, and other ranks may have finished it.
  void note_lost(int64_t epoch) { lost_ = c10::hash_combine(lost_, c10::get_hash(epoch)); }
  // A hash of their epochs; 0: none since the last step or zero_grad().
  int64_t lost() const { return static_cast<int64_t>(lost_); }
  void forget_lost() { lost_ = 0; }

  // See Note [Changed too early].
  void note_change() { changed_ = changed_ || count_ > 0; }
  void note_clipping() { changed_ = true; }
  void forget_changes() { changed_ = false; }
  bool changed() const { return changed_; }  // since the last backward
  void note_changed_too_early() { changed_too_early_ = true; }
  bool changed_too_early() const { return changed_too_early_; }

  // How often the ranks have begun to agree on a step or a norm.
  void begin_agreement() { ++agreements_; }
  int64_t agreements() const { return agreements_; }

  // Of the last backward that began to reduce. Ranks may differ where not all of them began a
  // backward that threw; the next step makes it the largest again.
  int64_t epoch() const { return epoch_; }
  void set_epoch(int64_t epoch) { epoch_ = epoch; }
  // A step was made. None has begun to reduce since then.
  void end_step() {
    clear();
    stepped_ = epoch_;
    changed_ = false;
    forget_lost();
  }
  bool none_since_step() const { return epoch_ == stepped_; }

 private:
  int64_t count_ = 0;
  size_t which_ = 0;
  size_t lost_ = 0;
  bool changed_ = false;
  bool changed_too_early_ = false;
  int64_t epoch_ = 0;
  int64_t agreements_ = 0;
  int64_t stepped_ = 0;  // the epoch as of the last step
};

}  // namespace zero_ext
