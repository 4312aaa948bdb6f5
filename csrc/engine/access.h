// EngineLock and Access: how a thread enters the engine.
//
// Owner:     Engine owns the lock. A public method of a facet holds an Access while it runs.
// Threads:   one at a time. An Access first waits for backwards that threw, where they are undone
//            on another thread. On a device it makes the engine's device the current one. See
//            Note [Locks and the GIL] in core/gil.h.
// Rule:      a method that takes a `const Access&` is called under the lock, by another facet.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <mutex>
#include <optional>

#include "autograd/backward_watch.h"
#include "core/gil.h"

namespace zero_ext {

class EngineLock {
 public:
  EngineLock(c10::Device device, int64_t rank) : device_(device), mutex_(rank) {}
  // Before the first Access.
  void set_watch(std::shared_ptr<BackwardWatch> watch) { watch_ = std::move(watch); }

 private:
  friend class Access;

  const c10::Device device_;
  OwnedMutex mutex_;
  std::shared_ptr<BackwardWatch> watch_;
  // The stream of the last hook. The report of a failure comes while another one is current.
  std::optional<c10::Stream> backward_stream_;
};

class Access {
 public:
  // `reported`: the caller is the report of a failed backward, and must not wait for itself.
  enum class Failures { awaited, reported };
  explicit Access(EngineLock& lock, Failures failures = Failures::awaited)
      : lock_(lock.mutex_, std::defer_lock) {
    check_no_gil();  // also for the wait below
    const bool on_device = !lock.device_.is_cpu();
    if (failures == Failures::awaited) lock.watch_->wait_for_failures();
    lock_.lock();
    if (on_device) enter_device(lock, failures);
    // Tensors made here outlive inferences and transforms of torch.func, and must not be theirs.
    if (c10::InferenceMode::is_enabled()) {
      no_inference_.emplace(false);
      no_grad_.emplace();
    }
  }

 private:
  void enter_device(EngineLock& lock, Failures failures);

  std::unique_lock<OwnedMutex> lock_;
  std::optional<c10::InferenceMode> no_inference_;
  std::optional<at::NoGradGuard> no_grad_;
  c10::impl::ExcludeDispatchKeyGuard no_transforms_{
      c10::DispatchKeySet{c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                          c10::DispatchKey::FuncTorchDynamicLayerBackMode}};
  c10::OptionalDeviceGuard device_;
  c10::OptionalStreamGuard stream_;
};

}  // namespace zero_ext
