// mark_written: see Note [Marks of changed elements] in changes.h.
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/mark_written.cpp
//
// Memory bound: reads param and master.
#include "kernels/cpu/changes.h"

namespace zero_ext::kernels {
namespace {

template <class T>
struct MarkWritten {
  const T* param;
  const float* master;
  Changes changes;
  bool ahead;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    const auto visit = [&](int64_t i, int64_t n, uint16_t* differing) ZERO_EXT_BODY_LAMBDA {
      for (int64_t j = 0; j < n; ++j) {
        differing[j] = static_cast<uint16_t>(rounded_bits<T>(master[i + j]) ^ param[i + j].bits);
      }
    };
    mark_blocks(changes, begin, end, ahead, visit, param, master);
  }
};

template <class T>
Status run_marks(const void* param, const float* master, int64_t numel, const Changes& changes,
                 const Launch& launch) {
  return run(launch, numel,
             MarkWritten<T>{static_cast<const T*>(param), master, changes,
                            fetches_ahead(FetchAhead::all)});
}

}  // namespace

Status mark_written(const void* param, DType param_dtype, const float* master, int64_t numel,
                    uint16_t* changed, int64_t first, const Launch& launch) {
  if (numel < 0 || param_dtype == DType::f32) return Status::bad_argument;
  const Changes changes{.words = changed, .first = first};
  return param_dtype == DType::bf16 ? run_marks<BFloat16>(param, master, numel, changes, launch)
                                    : run_marks<Float16>(param, master, numel, changes, launch);
}

}  // namespace zero_ext::kernels
