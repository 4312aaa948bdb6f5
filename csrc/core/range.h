// Range: a stretch of time on this thread that torch.profiler shows by name.
//
// Without a profiler it costs a look at a counter of torch's; the name is made only for a profiler.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string>
#include <utility>

namespace zero_ext {

class Range {
 public:
  // Shown as "zero_ext::VERB OF" in ASCII; `of`: a string, or a function that makes one.
  template <typename Of>
  Range(const char* verb, const Of& of) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (callbacks.has_value()) [[unlikely]]
      begin(std::move(*callbacks), std::string(verb) + " " + of());
  }
  Range(const char* verb, const std::string& of)
      : Range(verb, [&]() -> const std::string& { return of; }) {}
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  void begin(at::StepCallbacks&& callbacks, const std::string& name);

  std::optional<at::RecordFunction> record_;
};

}  // namespace zero_ext
