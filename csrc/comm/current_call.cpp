#include "comm/current_call.h"

#include "comm/local/shared_host_transport.h"

namespace zero_ext {
namespace {

std::string& call_of_thread() {
  thread_local std::string call;
  return call;
}

}  // namespace

const std::string& current_call() { return call_of_thread(); }

bool enter_call(const std::string& name) {
  if (!call_of_thread().empty()) return false;
  call_of_thread() = name;
  SharedHostTransport::show_call(name);
  return true;
}

void leave_call() {
  call_of_thread().clear();
  SharedHostTransport::show_call("");
}

CallScope::CallScope(const std::string& name) : outermost_(enter_call(name)) {}

CallScope::~CallScope() {
  if (outermost_) leave_call();
}

}  // namespace zero_ext
