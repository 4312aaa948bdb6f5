// Farewells: engines that died on this rank while other ranks may still take their offers.
//
// Owner:   the process.
// Threads: one waits for each, so that deleting a model blocks nobody.
#pragma once

#include <chrono>

#include "comm/comm.h"
#include "gather/gatherer.h"

namespace zero_ext {

// Keeps `comm` (a copy) and `outstanding` until all ranks have said shutdown handshake, or for the process group's
// timeout.
void finish_shutdown_later(const Comm& comm, Gatherer::OutstandingSends outstanding);

// Waits for all of them, as long as persistent sends are taken again and again within `patience`.
void wait_for_shutdowns(std::chrono::milliseconds patience);

}  // namespace zero_ext
