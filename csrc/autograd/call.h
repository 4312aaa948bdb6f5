// Call: one call of a module in a forward, and how a backward enters and leaves it.
//
// Owner:   the hooks on the nodes of its outputs; those on the nodes of its inputs hold it weakly.
// Threads: made and watched on the thread of the forward; the hooks run on autograd's threads.
//
// The hooks run in every backward over the graph. The graph itself stays as it is: one more node
// would group the sums of gradients differently. A view loses its node when it is written to, and
// the graph then goes on from the node of its base: both have a hook. A tensor that the module
// hands through is not watched as an output: its node is from before the call.
//
// Note [When has a backward left a call?]
// Autograd runs the ready node that was created last. When a node from before the call runs, or one
// of another call that had ended before this one began, every node of this call has run.
// AccumulateGrad alone runs out of that order. An inner backward has left all calls when it ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "autograd/backward_listener.h"
#include "core/torch_internals.h"

namespace zero_ext {

class Call : public std::enable_shared_from_this<Call> {
 public:
  // The forward enters module hook site `site` with `inputs`, and goes on after this.
  static std::shared_ptr<Call> begin(std::weak_ptr<BackwardListener> listener, int64_t site,
                                     const std::vector<at::Tensor>& inputs);
  ~Call() { --living_; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  // The forward leaves the module with `outputs`.
  void end(const std::vector<at::Tensor>& outputs);

  int64_t site() const { return site_; }
  // The forward of `other` had ended when this one began.
  bool is_after(const Call& other) const { return begin_ >= other.end_; }

  // How many calls some graph may still lead a backward into.
  static int64_t living() { return living_; }

 private:
  class OutputHook;
  class InputHook;

  Call(std::weak_ptr<BackwardListener> listener, int64_t site)
      : listener_(std::move(listener)), site_(site), begin_(next_sequence_number()) {
    ++living_;
  }
  void watch_input(Node* node);
  void watch_output(Node* node);

  std::weak_ptr<BackwardListener> listener_;
  int64_t site_;
  uint64_t begin_;  // autograd's sequence numbers
  uint64_t end_ = 0;
  std::set<const Node*> inputs_;  // nodes with a hook of this call
  static inline std::atomic<int64_t> living_{0};
};

}  // namespace zero_ext
