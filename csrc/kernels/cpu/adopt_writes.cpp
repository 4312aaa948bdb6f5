// adopt_writes: master[i] = param[i] == param_dtype(master[i]) ? master[i] : float(param[i])
// Compile alone: g++ -std=c++20 -O3 -ffp-contract=off -fno-math-errno -I. -c kernels/cpu/adopt_writes.cpp
//
// Memory bound: reads param and master. Writes only blocks of master that hold a written element;
// almost always there is none.
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/table.h"

namespace zero_ext::kernels {
namespace {

template <class T>
struct AdoptWrites {
  const T* param;
  float* master;
  bool ahead;

  ZERO_EXT_BODY void operator()(int64_t begin, int64_t end) const {
    for (int64_t i = begin, n = 0; i < end; i += n) {
      n = block_numel(end - i, ahead);
      if (ahead) {
        fetch_ahead(param + i, n, end - i);
        fetch_ahead(master + i, n, end - i);
      }
      uint32_t differing = 0;
      for (int64_t k = i; k < i + n; ++k) {
        differing |= static_cast<uint32_t>(is_written(param[k], master[k]));
      }
      if (differing == 0) continue;
#pragma GCC ivdep
      for (int64_t k = i; k < i + n; ++k) master[k] = written_or_master(param[k], master[k]);
    }
  }
};

}  // namespace

Status adopt_writes_cpu(const void* param, DType param_dtype, float* master, int64_t numel,
                        const Launch& launch) {
  if (numel < 0) return Status::bad_argument;
  return with_element(param_dtype, [&]<class T>(T) {
    return run(
        launch, numel,
        AdoptWrites<T>{static_cast<const T*>(param), master, fetches_ahead(FetchAhead::all)});
  });
}

}  // namespace zero_ext::kernels
