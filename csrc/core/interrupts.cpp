#include "core/interrupts.h"

#include <utility>

namespace zero_ext {
namespace {

InterruptHooks& hooks() {
  static auto* instance = new InterruptHooks;  // never destroyed: threads may outlive main()
  return *instance;
}

}  // namespace

void set_interrupt_hooks(InterruptHooks given) { hooks() = std::move(given); }

void check_interrupt() {
  if (hooks().check) hooks().check();
}

bool is_interrupt(const std::exception& error) {
  return hooks().is_thrown && hooks().is_thrown(error);
}

}  // namespace zero_ext
