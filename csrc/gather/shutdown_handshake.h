// Farewells: engines that died on this rank while other ranks may still take their offers.
//
// Owner:   the process.
// Threads: one waits for each, so that deleting a model blocks nobody.
#pragma once

#include <chrono>

#include "comm/comm.h"
#include "gather/gatherer.h"

namespace zero_ext {

// Keeps `comm` (a copy) and `legacy` until all ranks have said farewell, or for the process group's
// timeout.
void bid_farewell(const Comm& comm, Gatherer::Legacy legacy);

// Waits for all of them, as long as lasting offers are taken again and again within `patience`.
void wait_for_farewells(std::chrono::milliseconds patience);

}  // namespace zero_ext
