// BackwardListener: what hooks on autograd's graph report.
//
// Threads: called on the thread that runs the backward, without the GIL and without our locks; the
//          listener locks.
#pragma once

#include <cstdint>
#include <memory>

namespace zero_ext {

class Call;

class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  // The AccumulateGrad of parameter i is about to run, inside the current graph task.
  virtual void before_gradient(int64_t i) = 0;
  // It ran: the gradient is in the parameter's .grad, and the user's own hooks have seen it.
  virtual void after_gradient(int64_t i) = 0;
  // Of a DTensor, before after_gradient(): the gradient in .grad becomes a plain one.
  virtual void localize_gradient(int64_t i) = 0;
  // The outermost backward that reached one of our parameters ended, or threw.
  virtual void backward_ended() = 0;
  virtual void backward_failed() noexcept = 0;
  // An inner backward ended, while the outer one goes on.
  virtual void inner_backward_ended(int task) = 0;
  // A backward is about to enter a call. It may do so several times.
  virtual void call_entered(const std::shared_ptr<Call>& call) = 0;
  // A backward has left a call. It may not have entered it.
  virtual void call_left(const std::shared_ptr<Call>& call) = 0;
};

}  // namespace zero_ext
