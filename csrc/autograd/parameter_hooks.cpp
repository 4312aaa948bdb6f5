#include "autograd/parameter_hooks.h"

#include <utility>

namespace zero_ext {
namespace {

class BeforeGradient : public EntryHook {
 public:
  BeforeGradient(std::weak_ptr<BackwardListener> listener, int64_t i)
      : listener_(std::move(listener)), i_(i) {}
  void run() override {
    if (auto listener = listener_.lock()) listener->before_gradient(i_);
  }

 private:
  std::weak_ptr<BackwardListener> listener_;
  int64_t i_;
};

class AfterGradient : public ExitHook {
 public:
  AfterGradient(std::weak_ptr<BackwardListener> listener, int64_t i, bool is_plain)
      : listener_(std::move(listener)), i_(i), is_plain_(is_plain) {}
  void run() override {
    auto listener = listener_.lock();
    if (listener == nullptr) return;
    if (!is_plain_) listener->localize_gradient(i_);
    listener->after_gradient(i_);
  }

 private:
  std::weak_ptr<BackwardListener> listener_;
  int64_t i_;
  bool is_plain_;
};

}  // namespace

NodePtr hook_parameter(const at::Tensor& parameter, int64_t i,
                       const std::weak_ptr<BackwardListener>& listener) {
  NodePtr node = accumulator_of(parameter);
  add_hook(*node, std::make_unique<BeforeGradient>(listener, i));
  const bool is_plain = !parameter.unsafeGetTensorImpl()->is_python_dispatch();
  add_hook(*node, std::make_unique<AfterGradient>(listener, i, is_plain));
  return node;
}

}  // namespace zero_ext
