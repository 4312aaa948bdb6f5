// Notices: short messages that a rank has begun a backward, for ranks that do not see each other's
// epochs (see Note [Epochs] in message.h).
//
// Owner:     Reductions.
// Threads:   called only under the engine's lock.
// Invariant: one receive is posted for each other rank, or none for any. A notice that arrives while
//            this rank waits in a step is that of the backward that it takes part in next.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/comm.h"

namespace zero_ext {

class Notices {
 public:
  explicit Notices(Comm& comm) : comm_(comm) {}

  // This rank begins a backward that every rank announces. `agreements`: that it has begun so far.
  void send(int64_t epoch, int64_t agreements);
  // The notices of all ranks about this backward are here. `what`: as in Pending::wait.
  void finish(int64_t epoch, const std::function<std::string()>& what);
  // A rank whose notice of a backward after `epoch` has arrived, and that had begun fewer agreements
  // then; -1: none. Never waits. A rank that had begun as many has passed this rank's agreement.
  int64_t who_began_after(int64_t epoch, int64_t agreements);

 private:
  void post_receives();
  void post_receive(int64_t peer);

  Comm& comm_;
  std::vector<at::Tensor> received_;  // [world], two numbers each; empty where none is posted
  Pending receiving_;
  // With their epochs. A notice is kept until the backward after its own has ended: then all ranks
  // have received it.
  std::vector<std::pair<int64_t, PostedSend>> sent_;
  int64_t last_finished_ = 0;
};

}  // namespace zero_ext
