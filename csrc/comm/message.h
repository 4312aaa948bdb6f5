// What a message between ranks is labelled with, whichever way it takes.
//
// Note [Epochs]
// An epoch is one backward, or one agreement: the messages that all ranks exchange together.
// - An error may end an epoch on one rank before that rank has sent everything. The others must not
//   wait for it until the timeout. So each rank shows which epochs it is past. Waiting for a message
//   that was not sent raises at once when its sender is past the epoch.
// - Each rank also shows of which epochs it reads no more messages. A sender that waits for it to
//   read one goes on: nobody needs that message.
// - A repeated backward is an epoch of its own. After an error on all ranks, or on one rank while the
//   others waited for it, all ranks number the next epoch alike.
// - A rank that waited until its timeout abandons the epoch. A rank that has not begun this epoch
//   skips it and meets the others in the next one. A rank inside it fails.
// - Epochs that a rank left because of an error of its own are not skipped: after an error on all
//   ranks, a slow rank would skip what a fast one has left and now repeats.
// - Agreements repeat nothing that ranks count alike. After an error some ranks may ask again, others
//   may never have asked. So any error abandons an agreement: nobody can complete it.
// Only ranks that read each other's memory see each other's epochs.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>

// Only declared here: c10d's headers take longer to compile than most of our files.
namespace c10d {
class Work;
}

namespace zero_ext {

// A message or a collective under way.
using Message = c10::intrusive_ptr<c10d::Work>;

// What a rank does for others while it waits for them. Returns whether it did something: then the
// timeout begins again.
using Meanwhile = std::function<bool()>;

enum class MessageKind : int { reduction, gather, agreement };
constexpr int kMessageKinds = 3;

constexpr int64_t kNoEpoch = -1;

struct MessageLabel {
  MessageKind kind;
  int64_t tag;
  int64_t epoch = kNoEpoch;
};

// How an error has ended this rank's part of an epoch. The rank reads no more messages of it.
enum class EpochExit {
  sent_all,   // the other ranks have everything that they need from this one
  early,      // they do not
  abandoned,  // nor may a rank begin the epoch that has not begun it; a timeout does this
};

}  // namespace zero_ext
