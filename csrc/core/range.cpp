#include "core/range.h"

namespace zero_ext {
namespace {

// As ASCII: the trace files of torch.profiler leave out other names.
std::string in_ascii(const std::string& name) {
  static const std::string kDots = "…";
  std::string result;
  for (size_t at = 0; at < name.size(); ++at) {
    const auto byte = static_cast<unsigned char>(name[at]);
    if (name.compare(at, kDots.size(), kDots) == 0) {
      result += "...";
    } else if (byte < 0x80) {
      result += name[at];
    } else if (byte >= 0xc0) {  // the first of the bytes of one character
      result += '?';
    }
  }
  return result;
}

}  // namespace

void Range::begin(at::StepCallbacks&& callbacks, const std::string& name) {
  record_.emplace(std::move(callbacks));
  record_->before(in_ascii("zero_ext::" + name));
}

}  // namespace zero_ext
