// SideStream: a device's stream beside the one that the caller computes on. On the host: nothing.
//
// Owner:   an engine's context; one for reductions, one for gathers.
// Threads: called only under Engine::mutex_.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace zero_ext {

// The stream that `device` computes on now, in this thread.
c10::Stream current_stream(c10::Device device);

// `later` goes on when what `earlier` has been given so far is done.
void order(const c10::Stream& earlier, const c10::Stream& later);

class SideStream {
 public:
  SideStream() = default;  // the host's
  explicit SideStream(c10::Device device);

  // While it lives, the side stream is the current one. It begins after all that the one before
  // was given.
  class Scope {
   public:
    explicit Scope(const SideStream& side);

   private:
    c10::OptionalStreamGuard guard_;
  };

  // The current stream goes on when all that this one was given is done. Nothing where it was given
  // nothing ever: a stream that is being captured must not wait for one that is not.
  void join() const;

 private:
  std::optional<c10::Stream> stream_;
  mutable bool used_ = false;
};

}  // namespace zero_ext
