// The call of zero_ext that a thread is in and that waits for other ranks, for messages: "step()".
//
// Threads: a call is of its thread. Local peers see the call that any thread entered last.
#pragma once

#include <string>

namespace zero_ext {

// Names the call from here on. Inside another one it changes nothing: the user knows the outermost.
class CallScope {
 public:
  explicit CallScope(const std::string& name);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  bool outermost_;
};

// "" outside of calls.
const std::string& current_call();

// The same for code that has no scope: returns whether this is the outermost call, which is left.
bool enter_call(const std::string& name);
void leave_call();

}  // namespace zero_ext
