#include "core/gil.h"

#include "core/errors.h"

namespace zero_ext {
namespace {

std::atomic<bool (*)()> holds_gil{nullptr};

}  // namespace

void set_gil_hook(bool (*holds)()) { holds_gil = holds; }

void check_no_gil() {
  bool (*const holds)() = holds_gil;
  TORCH_INTERNAL_ASSERT(holds == nullptr || !holds(),
                        "zero_ext: a thread that holds the GIL would wait for the engine's lock, "
                        "whose holder may wait for the GIL.");
}

void OwnedMutex::lock() {
  check_no_gil();
  const std::thread::id me = std::this_thread::get_id();
  TORCH_CHECK(owner_.load(std::memory_order_relaxed) != me, where(rank_),
              "this thread is inside another call of the same model. In the handler ",
              "of a signal set a flag, and use the model after that call.");
  mutex_.lock();
  owner_.store(me, std::memory_order_relaxed);
}

}  // namespace zero_ext
