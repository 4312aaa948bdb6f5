// The CPU's table, and the choice of its instruction set.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/table.cpp
#include "kernels/cpu/table.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels/cpu/dispatch.h"

namespace zero_ext::kernels {
namespace {

bool supported(InstructionSet set) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  switch (set) {
    case InstructionSet::avx512:
      return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
    case InstructionSet::avx2:
      return avx2;
    case InstructionSet::baseline:
      return true;
  }
#endif
  return set == InstructionSet::baseline;
}

InstructionSet best() {
  for (InstructionSet set : {InstructionSet::avx512, InstructionSet::avx2}) {
    if (supported(set)) return set;
  }
  return InstructionSet::baseline;
}

std::atomic<InstructionSet>& in_use() {
  static std::atomic<InstructionSet> set{best()};
  return set;
}

// The kernels that gain from prefetching on this processor. Sums gain on AMD's Zen 5 and later. All
// gain on Intel's server cores since Sapphire Rapids, recognised by their fp16 arithmetic.
FetchAhead best_fetch_ahead() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return FetchAhead::none;
  if (ebx == signature_AMD_ebx && ecx == signature_AMD_ecx && edx == signature_AMD_edx) {
    __get_cpuid(1, &eax, &ebx, &ecx, &edx);
    const unsigned base = (eax >> 8) & 0xF;
    const unsigned extended = (eax >> 20) & 0xFF;
    return base == 0xF && base + extended >= 0x1A ? FetchAhead::sums : FetchAhead::none;
  }
  if (ebx == signature_INTEL_ebx && ecx == signature_INTEL_ecx && edx == signature_INTEL_edx) {
    constexpr unsigned kAvx512Fp16 = 1U << 23;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAvx512Fp16) != 0)
      return FetchAhead::all;
  }
#endif
  return FetchAhead::none;
}

std::atomic<FetchAhead>& fetch_ahead_in_use() {
  static std::atomic<FetchAhead> kernels{best_fetch_ahead()};
  return kernels;
}

}  // namespace

bool fetches_ahead(FetchAhead least) {
  return fetch_ahead_in_use().load(std::memory_order_relaxed) >= least;
}

FetchAhead use_fetch_ahead(FetchAhead kernels) {
  return fetch_ahead_in_use().exchange(kernels, std::memory_order_relaxed);
}

InstructionSet instruction_set() { return in_use().load(std::memory_order_relaxed); }

bool use_instruction_set(InstructionSet set) {
  if (!supported(set)) return false;
  in_use().store(set, std::memory_order_relaxed);
  return true;
}

const Kernels& cpu() {
  static constexpr Kernels kTable{
      .accumulate_list = accumulate_list_cpu,
      .accumulate_ranks = accumulate_ranks_cpu,
      .adam = adam_cpu,
      .sgd = sgd_cpu,
      .cast = cast_cpu,
      .flatten = flatten_cpu,
      .find_nonfinite = find_nonfinite_cpu,
      .add_squares = add_squares_cpu,
      .adopt_writes = adopt_writes_cpu,
      .clip_factor = clip_factor_cpu,
      .show_words = show_words_cpu,
      .await_words = await_words_cpu,
      .capture_id = [](void*) -> uint64_t { return 0; },
      .ask_during_captures = [] {},
  };
  return kTable;
}

const char* cpu_instruction_set() {
  switch (instruction_set()) {
    case InstructionSet::avx512:
      return "avx512";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::baseline:
      break;
  }
  return "baseline";
}

}  // namespace zero_ext::kernels
