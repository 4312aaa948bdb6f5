// What the ranks of a group give each other when a collective runs: bytes, over a backend for CPU
// tensors. Knows nothing of streams.
//
// Threads: run() is called by one thread at a time per wire, in the same order on every rank. It
// blocks, but for no longer than the timeout after a peer's last sign of life.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

namespace lagged {

using Wire = c10::intrusive_ptr<c10d::Backend>;

// A range of device memory, which is the host's.
struct Piece {
  char* data = nullptr;
  int64_t bytes = 0;
};

// What must be the same on all ranks.
struct Agreement {
  enum class Kind : int64_t {
    allreduce,
    reduce,
    broadcast,
    allgather,
    gather,
    reduce_scatter,
    scatter,
    alltoall,
    barrier
  };
  Kind kind = Kind::barrier;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED;
  int64_t root = -1;
};

// An abort ends a collective that is under way, as NCCL's does. Its messages end in nobody's name.
struct Aborted : std::exception {};

struct Collective {
  Agreement agreement;
  std::vector<Piece> sends;             // [world], to each rank
  std::vector<int64_t> received_bytes;  // [world], from each rank
  // Called with what each rank has sent, after all has been sent: it may write what was read.
  std::function<void(const std::vector<const char*>& received)> deliver;

  // Throws where the ranks disagree about kinds or sizes; nothing has been delivered then, and the
  // next collective may follow. Throws Aborted once `cut` is set; nothing is delivered then, either.
  void run(c10d::Backend& wire, std::chrono::milliseconds timeout,
           const std::atomic<bool>& cut) const;
};

// A message between two ranks. Those of one pair arrive in the order of their sending.
struct Message {
  int peer;
  bool sending;
  Piece piece;
};

// All at once, so that ranks may name theirs in any order.
void run_messages(const std::vector<Message>& messages, c10d::Backend& wire,
                  std::chrono::milliseconds timeout);

const char* name_of(Agreement::Kind kind);

}  // namespace lagged
