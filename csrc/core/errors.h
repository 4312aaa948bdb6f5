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

// Runs `call`, which posts something to a backend: what that throws itself, without a word about
// who and where, is raised again behind what().
template <typename What, typename Call>
void name_errors(const What& what, const Call& call) {
  try {
    call();
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, what(), ": ", error.what());
  }
}

}  // namespace zero_ext
