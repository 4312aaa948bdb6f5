// adam: one step of Adam or AdamW on a flat range; formula: AdamArgs in kernels.h.
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/adamw.cu
//
// Memory bound: reads grad; reads and writes master, both moments and the parameter: 32 bytes per
// element with a half-precision parameter.
#include <type_traits>

#include "kernels/constants.h"
#include "kernels/cuda/adam_element.h"
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"
#include "kernels/moments.h"

namespace zero_ext::kernels {
namespace {

using namespace device;

// NaN wins, as in torch.maximum.
__device__ inline float maximum(float a, float b) { return a > b || a != a ? a : b; }

template <class M>
__device__ inline M stored(float moment, uint32_t step) {
  if constexpr (std::is_same_v<M, float>) {
    return moment;
  } else {
    return {randomly_rounded(moment, step)};
  }
}

// T: the parameter's element. M: a moment's element.
template <class T, class M, bool amsgrad, bool decoupled>
struct Adam {
  static constexpr bool kHasParam = !std::is_same_v<T, NoParam>;
  static constexpr int kWidth = 4;
  static constexpr int kUnroll = 1;

  AdamConstants c;
  float* master;
  T* param;
  const float* grad;
  M* exp_avg;
  M* exp_avg_sq;
  float* max_exp_avg_sq;

  template <int N>
  struct Loaded {
    Pack<float, N> master;
    Pack<T, N> param;
    Pack<float, N> grad;
    Pack<M, N> exp_avg;
    Pack<M, N> exp_avg_sq;
    Pack<float, N> max_exp_avg_sq;
  };

  __device__ int64_t head(int64_t numel) const {
    const int64_t head = head_numel<kWidth>(numel, master, grad, exp_avg, exp_avg_sq);
    if constexpr (kHasParam) {
      if (head_numel<kWidth>(numel, master, param) != head) return numel;
    }
    if constexpr (amsgrad) {
      if (head_numel<kWidth>(numel, master, max_exp_avg_sq) != head) return numel;
    }
    return head;
  }

  template <int N>
  __device__ Loaded<N> load(int64_t i) const {
    Loaded<N> loaded;
    loaded.master = device::load<N>(master + i);
    if constexpr (kHasParam) loaded.param = device::load<N>(param + i);
    loaded.grad = device::load<N>(grad + i);
    loaded.exp_avg = device::load<N>(exp_avg + i);
    loaded.exp_avg_sq = device::load<N>(exp_avg_sq + i);
    if constexpr (amsgrad) loaded.max_exp_avg_sq = device::load<N>(max_exp_avg_sq + i);
    return loaded;
  }

  // Element k of `loaded` becomes the values to store.
  template <int N>
  __device__ void update(int k, Loaded<N>& loaded) const {
    float p = loaded.master.value[k];
    if constexpr (kHasParam) p = written_or_master(loaded.param.value[k], p);
    float m = to_float(loaded.exp_avg.value[k]);
    float v = to_float(loaded.exp_avg_sq.value[k]);
    update_moments<decoupled>(c, loaded.grad.value[k], p, m, v);
    loaded.exp_avg.value[k] = stored<M>(m, c.step);
    loaded.exp_avg_sq.value[k] = stored<M>(v, c.step);
    if constexpr (amsgrad) {
      v = maximum(loaded.max_exp_avg_sq.value[k], v);
      loaded.max_exp_avg_sq.value[k] = v;
    }
    p = updated(c, p, m, v);
    loaded.master.value[k] = p;
    if constexpr (kHasParam) loaded.param.value[k] = from_float<T>(p);
  }

  template <int N>
  __device__ int32_t finish(int64_t i, Loaded<N> loaded) const {
#pragma unroll
    for (int k = 0; k < N; ++k) update(k, loaded);
    store(master + i, loaded.master);
    if constexpr (kHasParam) store(param + i, loaded.param);
    store(exp_avg + i, loaded.exp_avg);
    store(exp_avg_sq + i, loaded.exp_avg_sq);
    if constexpr (amsgrad) store(max_exp_avg_sq + i, loaded.max_exp_avg_sq);
    return 0;
  }
};

template <class T, class M, bool amsgrad, bool decoupled>
struct AdamUpdate {
  using Body = Adam<T, M, amsgrad, decoupled>;
  using Constants = AdamConstants;

  AdamArgs args;
  AdamConstants host_constants;

  __device__ AdamConstants constants() const { return constants_of(args, host_constants); }

  __device__ __host__ Body body(const AdamConstants& known) const {
    return {known,
            args.master,
            static_cast<T*>(args.param),
            args.grad,
            static_cast<M*>(args.exp_avg),
            static_cast<M*>(args.exp_avg_sq),
            args.max_exp_avg_sq};
  }

  __device__ Body body(const AdamConstants& known, const UpdateSegment& segment,
                       int64_t first) const {
    Body own = body(known);
    own.master += segment.begin + first;
    if constexpr (Body::kHasParam) own.param += segment.begin + first;
    own.grad += segment.begin + first;
    own.exp_avg += segment.states + first;
    own.exp_avg_sq += segment.states + first;
    if constexpr (amsgrad) own.max_exp_avg_sq += segment.states + first;
    return own;
  }
};

template <class Pack, class Update>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    update_segments(const __grid_constant__ Pack pack, const __grid_constant__ Update update) {
  __shared__ AdamConstants constants;
  __shared__ bool runs;
  if (!begin_update(update.args.on_device, constants, runs, [&] { return update.constants(); }))
    return;
  for_each_piece(pack, [&](const UpdateSegment& segment, int64_t begin, int64_t numel) {
    walk(update.body(constants, segment, begin), numel, threadIdx.x, blockDim.x);
  });
}

template <class T, class M, bool amsgrad, bool decoupled>
Status run_adam(const AdamArgs& args, const Launch& launch) {
  using Update = AdamUpdate<T, M, amsgrad, decoupled>;
  const Update update{args, constants_on_host(args)};
  if (args.segments != nullptr) {
    return run_short_pieces(args.segments, args.count, [&]<class Pack>(const Pack& pack) {
      return queue(launch, pack.pieces, update_segments<Pack, Update>, pack, update);
    });
  }
  return is_empty(args.on_device) ? run(launch, args.numel, update.body(update.host_constants))
                                  : run_update(launch, args.numel, update);
}

template <class T>
Status run_adam(const AdamArgs& args, const Launch& launch) {
  if (args.moments == Moments::bf16) {
    return args.decoupled ? run_adam<T, BFloat16, false, true>(args, launch)
                          : run_adam<T, BFloat16, false, false>(args, launch);
  }
  if (args.max_exp_avg_sq != nullptr) {
    return args.decoupled ? run_adam<T, float, true, true>(args, launch)
                          : run_adam<T, float, true, false>(args, launch);
  }
  return args.decoupled ? run_adam<T, float, false, true>(args, launch)
                        : run_adam<T, float, false, false>(args, launch);
}

// A list of one range as that range, whose kernel has no pieces to look for.
AdamArgs only_range(AdamArgs args) {
  const UpdateSegment segment = *args.segments;
  const auto move = [](void*& pointer, int64_t elements, DType dtype) {
    if (pointer != nullptr) pointer = static_cast<char*>(pointer) + elements * element_bytes(dtype);
  };
  const DType states = args.moments == Moments::bf16 ? DType::bf16 : DType::f32;
  args.master += segment.begin;
  move(args.param, segment.begin, args.param_dtype);
  args.grad += segment.begin;
  move(args.exp_avg, segment.states, states);
  move(args.exp_avg_sq, segment.states, states);
  if (args.max_exp_avg_sq != nullptr) args.max_exp_avg_sq += segment.states;
  args.numel = segment.numel;
  args.segments = nullptr;
  return args;
}

}  // namespace

Status adam_cuda(const AdamArgs& args, const Launch& launch) {
  if (args.numel < 0 || args.step < 1) return Status::bad_argument;
  if (args.segments != nullptr && args.count == 1 && args.moments != Moments::int8) {
    return adam_cuda(only_range(args), launch);
  }
  if (args.moments != Moments::f32 && args.max_exp_avg_sq != nullptr) return Status::bad_argument;
  if (args.moments == Moments::int8) return adam_blocks_cuda(args, launch);
  if (args.param == nullptr) return run_adam<NoParam>(args, launch);
  return with_element(args.param_dtype, [&]<class T>(T) { return run_adam<T>(args, launch); });
}

}  // namespace zero_ext::kernels
