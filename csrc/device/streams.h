// SideStream: a device's stream beside the one that the caller computes on. On the host: nothing.
//
// Owner:   an engine's context; one for reductions, one for gathers.
// Threads: called only under Engine::mutex_.
//
// Note [Graphs]
// A stream that is captured into a graph runs nothing meanwhile. What it waits for must be in the
// graph, and nothing outside may ever wait for what is. Between the two there is nothing to wait
// for: whoever captures has waited for the device before (torch.cuda.graph() does), and a graph
// runs on a stream of his, behind which everything of ours begins. So waits across are left out.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <optional>

namespace zero_ext {

// The stream that `device` computes on now, in this thread.
c10::Stream current_stream(c10::Device device);

// `later` goes on when what `earlier` has been given so far is done.
void order(const c10::Stream& earlier, const c10::Stream& later);

// Of the graph that `stream` is being captured into; 0 where it is not.
uint64_t capture_id(const c10::Stream& stream);

// What a stream had been given when it was recorded.
class StreamEvent {
 public:
  explicit StreamEvent(const c10::Stream& stream);
  const c10::Stream& stream() const { return stream_; }
  // `later` goes on when that is done. See Note [Graphs].
  void block(const c10::Stream& later) const;

 private:
  c10::Stream stream_;
  uint64_t capture_id_;
  c10::Event event_;
};

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

  // The current stream goes on when all that this one was given is done. See Note [Graphs].
  void join() const;

 private:
  std::optional<c10::Stream> stream_;
};

}  // namespace zero_ext
