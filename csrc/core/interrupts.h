// Interrupts: a thread that waits for other ranks hears that the user has interrupted it (Ctrl-C).
//
// Owner:   the process.
// Threads: check_interrupt() from any; the hooks are set once, before any wait.
#pragma once

#include <chrono>
#include <exception>
#include <functional>

namespace zero_ext {

// A waiting thread calls check_interrupt() this often.
constexpr std::chrono::milliseconds kInterruptSlice{20};

struct InterruptHooks {
  std::function<void()> check;                           // throws where there is an interrupt
  std::function<bool(const std::exception&)> is_thrown;  // whether `check` has thrown this
};
void set_interrupt_hooks(InterruptHooks hooks);

void check_interrupt();
// An error to pass on as it is.
bool is_interrupt(const std::exception& error);

}  // namespace zero_ext
