// What the capture of a graph forbids, noticed without capturing anything: work runs as ever.
//
// The rules are CUDA's (cudaStreamBeginCapture, mode "global"): a captured stream waits for
// captured work alone, the legacy default stream gets no work meanwhile, nobody waits for the
// device or asks it, and streams that have joined the capture are waited for before it ends. Pinned
// memory of captured copies lives as long as the graph; here: as the capture.
//
// Threads: any.
#pragma once

#include <string>
#include <vector>

#include "runtime.h"

namespace lagged::capture {

void begin(Queue& origin);
// What was violated since.
std::vector<std::string> end();

// For the device: what happens on it.
// That of the graph which `queue` is captured into; 0: none.
uint64_t id_of(const Queue& queue);
// What this thread asks from now on is no violation.
void let_this_thread_ask();
void launched(const Queue& queue);
void waited_for(const Event& moment, const Queue& by);
// Pinned memory that these streams use: a replay would read it, or write there.
void released(const std::vector<Queue*>& users);
void asked_by_host(const char* what);
void asked_for(const Event& moment);
// What is an error outside of a capture, too.
std::vector<std::string> faults();

}  // namespace lagged::capture
