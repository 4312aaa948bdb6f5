// Shutdown handshake: an engine was destroyed on this rank while other ranks may still take what it
// has posted.
//
// Owner:   the process.
// Threads: one waits for each handshake, so that deleting a model blocks nothing.
#pragma once

#include <chrono>
#include <memory>

#include "comm/comm.h"
#include "gather/posted_sends.h"

namespace zero_ext {

// Keeps `comm` (a copy) and `outstanding` until all ranks have begun their shutdown, or for the
// process group's timeout.
void finish_shutdown_later(const Comm& comm, OutstandingSends outstanding);

// Ends the groups, as ProcessGroups::abort() does.
void end_groups_later(std::shared_ptr<const ProcessGroups> groups,
                      std::chrono::milliseconds patience);

// Waits for all handshakes, as long as other ranks take persistent sends within each `patience`.
void wait_for_shutdowns(std::chrono::milliseconds patience);

}  // namespace zero_ext
