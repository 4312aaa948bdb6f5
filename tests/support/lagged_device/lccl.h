// "lccl": collectives of the device lagged, ordered by streams alone, as NCCL's are.
//
// Note [What lccl takes over from NCCL]
// A call returns at once. Its work is a task of the group's own stream, after what the caller's
// current stream had until then; wait() makes the current stream wait for it, and blocks the host
// only where a timeout is given or for a barrier. Tensors are kept alive until wait(), or without
// one until the task is done; nothing else protects them: who overwrites an input or reads a result
// on a stream that has not waited gets what NCCL would let him get, see Note [What a missing wait
// looks like here] in runtime.h.
// A group that dies, or is aborted, cuts off what is queued: it ends without having done anything.
// Other than NCCL: ranks that disagree get an error; a peer that does not come is one after the
// timeout, raised by the next wait of the host for anything; sums are taken in rank order, every
// addition rounded to the tensor's own dtype.
#pragma once

#include <chrono>

#include "lccl_exchange.h"

namespace lagged {

// A group over the ranks of `wire`, which nobody else may use. `timeout`: from when a collective
// runs until its peers have come.
__attribute__((visibility("default"))) Wire make_lccl(Wire wire, std::chrono::milliseconds timeout);

}  // namespace lagged
