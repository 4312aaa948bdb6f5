// SideStream: a device's stream beside the one that the caller computes on. On the host it does
// nothing.
//
// Owner:   an engine's context; one for reductions, one for gathers.
// Threads: called only under the engine's lock.
//
// Note [Graphs]
// While a stream is captured into a CUDA graph, it runs nothing. Captured work may wait only for
// work of the same graph, and nothing outside may wait for captured work. So a wait between
// captured and uncaptured work is left out. Nothing is lost: the caller has waited for the device
// before it captures (torch.cuda.graph() does). Later the graph runs on a stream of the caller's,
// and every side stream first waits for that stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <optional>

namespace zero_ext {

// The current stream of `device` in this thread.
c10::Stream current_stream(c10::Device device);

// `later` continues when all work queued on `earlier` so far is done.
void order(const c10::Stream& earlier, const c10::Stream& later);

// The number of the graph that `stream` is being captured into; 0 where it is not captured.
uint64_t capture_id(const c10::Stream& stream);

// A point in a stream: all work that was queued on it when the event was made.
class StreamEvent {
 public:
  explicit StreamEvent(const c10::Stream& stream);
  const c10::Stream& stream() const { return stream_; }
  // `later` continues when that work is done. See Note [Graphs].
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

  // While a Scope lives, the side stream is the current stream. It first waits for the stream that
  // was current before.
  class Scope {
   public:
    explicit Scope(const SideStream& side);
    // It waits for that point alone.
    Scope(const SideStream& side, const StreamEvent& point);

   private:
    c10::OptionalStreamGuard guard_;
  };

  // The current stream continues when all work queued on this stream is done. See Note [Graphs].
  void join() const;
  // The host waits for all work queued on this stream.
  void synchronize() const;

 private:
  std::optional<c10::Stream> stream_;
};

}  // namespace zero_ext
