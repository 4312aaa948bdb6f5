#include "comm/interruptible_wait.h"

#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "core/errors.h"
#include "core/interrupts.h"

namespace zero_ext {

void wait_interruptibly(const Message& message) {
  for (;;) {
    try {
      message->wait(kInterruptSlice);
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
