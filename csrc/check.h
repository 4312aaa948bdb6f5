// The beginning of every message: where(rank, unit) says whose log a reader is looking at. Ranks in
// messages are those among all processes, which the launcher's logs are named after.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <string>

namespace zero_ext {

inline std::string where(int64_t rank) { return "zero_ext [rank " + std::to_string(rank) + "]: "; }

inline std::string where(int64_t rank, const std::string& unit) {
  return "zero_ext [rank " + std::to_string(rank) + ", unit '" + unit + "']: ";
}

// What `error` says, without the stack that torch's own errors carry.
inline std::string text_of(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs == nullptr ? error.what() : torchs->what_without_backtrace();
}

}  // namespace zero_ext
