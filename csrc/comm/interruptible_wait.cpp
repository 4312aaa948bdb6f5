#include "comm/interruptible_wait.h"

#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "core/errors.h"
#include "core/interrupts.h"

namespace zero_ext {
namespace {

// Other ranks wait for what happens between two slices.
constexpr std::chrono::milliseconds kServingSlice{2};

}  // namespace

void wait_interruptibly(const Message& message, const Meanwhile& meanwhile) {
  const std::chrono::milliseconds slice = meanwhile ? kServingSlice : kInterruptSlice;
  for (;;) {
    if (meanwhile) meanwhile();
    try {
      message->wait(slice);
      return;
    } catch (const std::exception& error) {
      if (message->isCompleted()) break;  // since the end of the slice, or with this error
      if (text_of(error).find("imed out") == std::string::npos) throw;
    }
    check_interrupt();
  }
  message->wait();
}

}  // namespace zero_ext
