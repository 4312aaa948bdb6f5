// The kernels of every elementwise update on CUDA. `Element`, M: see updates.h.
#pragma once

#include "kernels/cuda/dispatch.h"
#include "kernels/updates.h"

namespace zero_ext::kernels::device {

// A body for dispatch.h.
template <class T, class M, class Element>
struct UpdateBody {
  static constexpr int kWidth = 4;
  static constexpr int kUnroll = Element::kUnroll;
  static constexpr int kStates = Element::kStates;

  Element element;
  float* master;
  T* param;
  const float* grad;
  M* states[3];

  template <int N>
  struct Loaded {
    Pack<float, N> master;
    Pack<T, N> param;
    Pack<float, N> grad;
    Pack<M, N> states[kStates + 1];
  };

  __device__ int64_t head(int64_t numel) const {
    const int64_t head = head_numel<kWidth>(numel, master, grad);
    if constexpr (kHasParam<T>) {
      if (head_numel<kWidth>(numel, master, param) != head) return numel;
    }
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      if (head_numel<kWidth>(numel, master, states[s]) != head) return numel;
    }
    return head;
  }

  template <int N>
  __device__ Loaded<N> load(int64_t i) const {
    Loaded<N> loaded;
    loaded.master = device::load<N>(master + i);
    if constexpr (kHasParam<T>) loaded.param = device::load<N>(param + i);
    loaded.grad = device::load<N>(grad + i);
#pragma unroll
    for (int s = 0; s < kStates; ++s) loaded.states[s] = device::load<N>(states[s] + i);
    return loaded;
  }

  // Element k of `loaded` becomes the values to store.
  template <int N>
  __device__ void update(int k, Loaded<N>& loaded) const {
    float p = loaded.master.value[k];
    if constexpr (kHasParam<T>) p = written_or_master(loaded.param.value[k], p);
    float state[kStates + 1];
#pragma unroll
    for (int s = 0; s < kStates; ++s) state[s] = to_float(loaded.states[s].value[k]);
    const float g = element.advance(loaded.grad.value[k], p, state);
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      loaded.states[s].value[k] = stored<M>(state[s], step_of(element.k));
    }
    p = element.applied(g, p, state);
    loaded.master.value[k] = p;
    if constexpr (kHasParam<T>) loaded.param.value[k] = from_float<T>(p);
  }

  template <int N>
  __device__ int32_t finish(int64_t i, Loaded<N> loaded) const {
#pragma unroll
    for (int k = 0; k < N; ++k) update(k, loaded);
    store(master + i, loaded.master);
    if constexpr (kHasParam<T>) store(param + i, loaded.param);
#pragma unroll
    for (int s = 0; s < kStates; ++s) store(states[s] + i, loaded.states[s]);
    return 0;
  }
};

// `on_host` is of `args` without OnDevice.
__device__ inline AdamConstants constants_on_device(const AdamArgs& args, AdamConstants on_host) {
  if (args.on_device.steps_done != nullptr) return counted_adam_constants(args);
  on_host.grad_scale = signed_scale(args.grad_scale, args.maximize, args.on_device);
  return on_host;
}

__device__ inline SgdConstants constants_on_device(const SgdArgs& args,
                                                   const SgdConstants& /*on_host*/) {
  return constants_of(args);
}

template <class Args>
auto constants_on_host(Args args) {
  args.on_device = {};
  return constants_of(args);
}

template <class T, class M, class Element, class Arguments>
struct Update {
  using Args = Arguments;
  using Body = UpdateBody<T, M, Element>;
  using Constants = typename Element::Constants;

  Args args;
  Constants on_host;

  // For the elements of a segment from `first` on.
  __device__ __host__ Body body(const Constants& constants, const UpdateSegment& segment,
                                int64_t first) const {
    const int64_t begin = segment.begin + first;
    Body own{{constants}, args.master + begin, static_cast<T*>(args.param), args.grad + begin, {}};
    if constexpr (kHasParam<T>) own.param += begin;
    for (int s = 0; s < Body::kStates; ++s) {
      own.states[s] = static_cast<M*>(state_of(args, s)) + segment.states + first;
    }
    return own;
  }
};

// Whether an update is made, by its OnDevice in device memory. Then the block has its constants.
// Every thread calls it; `constants` and `runs` are shared by the block.
template <class Args, class Constants>
__device__ inline bool begin_update(const Args& args, const Constants& on_host,
                                    Constants& constants, bool& runs) {
  if (threadIdx.x == 0) {
    runs = !skipped(args.on_device);
    if (runs) constants = constants_on_device(args, on_host);
  }
  __syncthreads();
  return runs;
}

template <class Update>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    update_range(const __grid_constant__ Update update,
                 const __grid_constant__ UpdateSegment range) {
  __shared__ typename Update::Constants constants;
  __shared__ bool runs;
  if (!begin_update(update.args, update.on_host, constants, runs)) return;
  walk(update.body(constants, range, 0), range.numel, thread_of_grid(), threads_of_grid());
}

template <class Pack, class Update>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    update_segments(const __grid_constant__ Pack pack, const __grid_constant__ Update update) {
  __shared__ typename Update::Constants constants;
  __shared__ bool runs;
  if (!begin_update(update.args, update.on_host, constants, runs)) return;
  for_each_piece(pack, [&](const UpdateSegment& segment, int64_t begin, int64_t numel) {
    walk(update.body(constants, segment, begin), numel, threadIdx.x, blockDim.x);
  });
}

// One range has kernels of its own, which have no pieces to look for; without OnDevice its
// constants are those of the host.
template <class Update>
Status run_range(const Update& update, const UpdateSegment& range, const Launch& launch) {
  if (range.numel < 0) return Status::bad_argument;
  if (range.numel == 0) return Status::ok;
  if (is_empty(update.args.on_device))
    return run(launch, range.numel, update.body(update.on_host, range, 0));
  const int64_t blocks = blocks_for<typename Update::Body>(range.numel);
  return queue(launch, blocks, update_range<Update>, update, range);
}

template <class Args>
Status run_update(const Args& args, const Launch& launch) {
  return with_update(args, [&]<class T, class M, class Element>() {
    using Call = Update<T, M, Element, Args>;
    const Call update{args, constants_on_host(args)};
    return with_segments(args, [&](const UpdateSegment* segments, int64_t count) {
      if (count == 1) return run_range(update, *segments, launch);
      return run_pieces<kShortPieceNumel>(segments, count, [&]<class Pack>(const Pack& pack) {
        return queue(launch, pack.pieces, update_segments<Pack, Call>, pack, update);
      });
    });
  });
}

}  // namespace zero_ext::kernels::device
