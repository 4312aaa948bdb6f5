// flatten, per segment:  overwrite: target[i] = target_dtype(source[i])
//                        add:       target[i] = target_dtype(float(target[i]) + float(source[i]))
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/flatten.cu
//
// Memory bound: reads source, reads (to add) and writes target.
#include <type_traits>

#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

template <class Source, class Target, Write write>
struct Flatten {
  static constexpr int kWidth = vector_numel<Source, Target>();
  static constexpr int kUnroll = 4;

  const Source* source = nullptr;
  Target* target = nullptr;

  __device__ Flatten at(const CopySegment& segment, int64_t begin) const {
    return {static_cast<const Source*>(segment.source) + begin,
            static_cast<Target*>(segment.target) + begin};
  }

  template <int N>
  struct Loaded {
    Pack<Source, N> source;
    Pack<Target, N> target;  // undefined where overwritten
  };

  __device__ int64_t head(int64_t numel) const { return head_numel<kWidth>(numel, source, target); }

  template <int N>
  __device__ Loaded<N> load(int64_t i) const {
    Loaded<N> loaded;
    loaded.source = device::load<N>(source + i);
    if constexpr (write == Write::add) loaded.target = device::load<N>(target + i);
    return loaded;
  }

  // The values written are checked: they are non-finite wherever the source is. Equal dtypes keep
  // their bits.
  template <int N>
  __device__ int32_t finish(int64_t i, const Loaded<N>& loaded) const {
    int32_t largest = 0;
    Pack<Target, N> result;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if constexpr (write == Write::add) {
        result.value[k] =
            from_float<Target>(to_float(loaded.target.value[k]) + to_float(loaded.source.value[k]));
      } else if constexpr (std::is_same_v<Source, Target>) {
        result.value[k] = loaded.source.value[k];
      } else {
        result.value[k] = from_float<Target>(to_float(loaded.source.value[k]));
      }
      largest = greatest(largest, magnitude_bits(to_float(result.value[k])));
    }
    store(target + i, result);
    return largest;
  }
};

}  // namespace

Status flatten_cuda(const CopySegment* segments, int64_t count, DType source_dtype,
                    DType target_dtype, Write write, int32_t* nonfinite, const Launch& launch) {
  return with_element(source_dtype, [&]<class Source>(Source) {
    return with_element(target_dtype, [&]<class Target>(Target) {
      return write == Write::add ? run_list(launch, segments, count,
                                            Flatten<Source, Target, Write::add>{}, nonfinite)
                                 : run_list(launch, segments, count,
                                            Flatten<Source, Target, Write::overwrite>{}, nonfinite);
    });
  });
}

}  // namespace zero_ext::kernels
