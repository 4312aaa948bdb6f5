// Kernels: the arithmetic of zero_ext as a table of function pointers, filled once per device.
//
// Raw pointers in, Status out; nothing here knows torch. Kernels allocate nothing, keep nothing,
// and may be called from any thread. All lengths are 64-bit element counts; every length, zero
// included, and every alignment is legal (64-byte alignment is the fast path).
//
// Note [One element, one result]
// An element's result depends on the values of that element alone: never on the length, on where a
// shard, a vector or a thread begins, on the number of threads or on the instruction set. Bodies
// and tails therefore use the same operations (fused multiply-adds where the formula says fma, IEEE
// division and square root), and nothing reassociates.
#pragma once

#include <cstdint>

#include "kernels/square_sum.h"

namespace zero_ext::kernels {

enum class DType : int32_t { f32, bf16, f16 };

constexpr int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

enum class Status : int32_t {
  ok,
  bad_argument,   // a combination that the kernel's comment excludes
  launch_failed,  // the device refused the launch (CUDA only)
};

// Runs body(context, begin, end) over disjoint pieces that cover [0, numel), possibly on several
// threads; returns when all are done. `grain` is the smallest piece worth a thread of its own.
using RangeBody = void (*)(void* context, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t numel, int64_t grain, RangeBody body, void* context);

inline void run_serially(int64_t numel, int64_t /*grain*/, RangeBody body, void* context) {
  if (numel > 0) body(context, 0, numel);
}

// Where and how a kernel runs. On CUDA every pointer of a call, `nonfinite` and OnDevice's too, is
// to memory of the current device, and the call returns when the work is queued on `stream`.
struct Launch {
  void* stream = nullptr;                   // cudaStream_t; unused on the CPU
  ParallelFor parallel_for = run_serially;  // CPU only
  const char** error =
      nullptr;  // where not null: the driver's words when launch_failed is returned
};

// One copy of a list: `numel` elements from `source` to `target`. `nonfinite`: a flag of its own,
// instead of the call's.
struct CopySegment {
  const void* source;
  void* target;
  int64_t numel;
  int32_t* nonfinite = nullptr;
};

// What a list only reads.
struct ReadSegment {
  const float* value;
  int64_t numel;
  int32_t* nonfinite = nullptr;
};

// One sum of a list.
struct AccumulateSegment {
  const void* grad;
  float* sum;
  int64_t numel;
  int32_t* nonfinite = nullptr;
};

template <class Segment>
constexpr int32_t* flag_of(const Segment& segment, int32_t* of_call) {
  return segment.nonfinite != nullptr ? segment.nonfinite : of_call;
}

// How a value is written over what the target holds.
enum class Write : int32_t { overwrite, add };

// What an update takes from the device's memory instead of from its caller, who would have to wait
// for it: each pointer is to one value, or null. On the CPU they are read during the call.
struct OnDevice {
  const int32_t* skip = nullptr;  // not 0: the call writes nothing
  // Replaces `step` and `first`: the number of updates made so far; in fp32, as torch counts
  // them, exact up to 2^24. Its powers of beta are
  // formed by squaring, because no two libraries agree about the last bit of pow.
  const float* steps_done = nullptr;
  const float* grad_factor = nullptr;  // multiplies grad_scale, in float
};

// Adam and AdamW on a flat range (Kingma & Ba 2015; Loshchilov & Hutter 2019), all arithmetic in
// fp32:
//   p = master[i], or float(param[i]) where param[i] is not the rounding of master[i]: the user
//   wrote it (see below) g = (maximize ? -1 : 1) * grad_scale * grad[i] decoupled:  p = p - lr *
//   weight_decay * p         otherwise:  g = fma(weight_decay, p, g) exp_avg    = fma(1 - beta1, g
//   - exp_avg, exp_avg) exp_avg_sq = fma(1 - beta2, g * g, beta2 * exp_avg_sq) v = max_exp_avg_sq ?
//   (max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq)) : exp_avg_sq p = p - (lr / bias_correction1)
//   * exp_avg / (sqrt(v) / sqrt(bias_correction2) + eps) master[i] = p;  param[i] = param_dtype(p),
//   round to nearest even
//
// Note [A written parameter wins over its master]
// `param` always holds the rounding of `master`, unless somebody wrote to it since. Comparing costs
// no traffic, because the cache line of `param` is read for the write anyway, and sees every kind
// of write (`p.data.copy_()` included, which leaves no trace in the version counter). Elements that
// were not written keep all bits of their master.
struct AdamArgs {
  float* master = nullptr;
  void* param =
      nullptr;  // compute copy, in param_dtype; null where the master itself is the parameter
  DType param_dtype = DType::bf16;
  const float* grad = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  float* max_exp_avg_sq = nullptr;  // AMSGrad only, else null
  int64_t numel = 0;
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  int64_t step = 1;  // number of this update, from 1; bias_correctionK = 1 - betaK^step, in double
  float grad_scale = 1.0F;
  bool maximize = false;
  bool decoupled = true;  // AdamW; false: Adam with weight decay in the gradient
  OnDevice on_device;
};

// SGD as torch.optim.SGD:
//   p, g as above;  g = fma(weight_decay, p, g)
//   momentum != 0:  buf = first ? g : fma(momentum, buf, (1 - dampening) * g);  g = nesterov ?
//   fma(momentum, buf, g) : buf p = fma(-lr, g, p)
struct SgdArgs {
  float* master = nullptr;
  void* param = nullptr;
  DType param_dtype = DType::bf16;
  const float* grad = nullptr;
  float* momentum_buffer = nullptr;  // null when momentum == 0
  int64_t numel = 0;
  double lr = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool first = false;
  float grad_scale = 1.0F;
  bool maximize = false;
  OnDevice on_device;
};

// In every function: `nonfinite`, where not null, is set to 1 if any value read from a gradient, or
// any sum written, is NaN or infinite, and is left alone otherwise.
struct Kernels {
  // sum[i] = fma(scale, float(grad[i]), fresh ? 0 : sum[i])
  // Memory bound: reads grad, reads (unless fresh) and writes sum. grad and sum do not overlap.
  Status (*accumulate)(const void* grad, DType dtype, float* sum, int64_t numel, float scale,
                       bool fresh, int32_t* nonfinite, const Launch& launch);

  // accumulate over `count` pairs at once (one parallel region or one launch for the whole list).
  // The segments' sums do not overlap each other.
  Status (*accumulate_list)(const AccumulateSegment* segments, int64_t count, DType dtype,
                            float scale, bool fresh, int32_t* nonfinite, const Launch& launch);

  // s = fresh ? 0 : sum[i];  for rank = 0 … ranks-1: s = fma(scale, float(grads[rank][i]), s);
  // sum[i] = s Rank order, one rounding per rank; equal, bit for bit, to `ranks` calls of
  // accumulate. One entry of `grads` may be exactly `sum` (then dtype is f32); no other overlap.
  Status (*accumulate_ranks)(const void* const* grads, int32_t ranks, DType dtype, float* sum,
                             int64_t numel, float scale, bool fresh, int32_t* nonfinite,
                             const Launch& launch);

  Status (*adam)(const AdamArgs& args, const Launch& launch);
  Status (*sgd)(const SgdArgs& args, const Launch& launch);

  // target[i] = target_dtype(source[i]), round to nearest even as torch (NaN stays NaN). Any pair
  // of dtypes.
  Status (*cast)(const void* source, DType source_dtype, void* target, DType target_dtype,
                 int64_t numel, const Launch& launch);

  // Gradients of `source_dtype` into their places in a flat buffer of `target_dtype`.
  // Write::overwrite: as cast. Write::add: target[i] = target_dtype(float(target[i]) +
  // float(source[i])).
  Status (*flatten)(const CopySegment* segments, int64_t count, DType source_dtype,
                    DType target_dtype, Write write, int32_t* nonfinite, const Launch& launch);

  // Sets the flag of each segment that holds NaN or infinity to 1, leaves the others alone.
  // Memory bound: reads the values.
  Status (*find_nonfinite)(const ReadSegment* segments, int64_t count, const Launch& launch);

  // *sum += sum of value[i]^2, in an order that does not matter: see Note [A norm without an order]
  // in square_sum.h. `value` begins at a multiple of 16 elements of its parameter. `sum` is a host
  // pointer on the CPU, a device pointer on CUDA.
  Status (*add_squares)(const float* value, int64_t numel, SquareSum* sum, const Launch& launch);

  // Makes master agree with what the user wrote, see Note [A written parameter wins over its
  // master]: master[i] = float(param[i]) where param[i] is not param_dtype(master[i]).
  Status (*adopt_writes)(const void* param, DType param_dtype, float* master, int64_t numel,
                         const Launch& launch);

  // *norm = float(sqrt(sum)), and *factor = min(1, max_norm / (sqrt(sum) + 1e-6)) as torch's
  // clip_grad_norm_, but 1 where the norm is not finite; in double, rounded once. All but max_norm
  // are host pointers on the CPU, device pointers on CUDA.
  Status (*clip_factor)(const SquareSum* sum, double max_norm, float* norm, float* factor,
                        const Launch& launch);

  // The number of the graph that `stream` is being captured into, unlike any earlier one's; 0 where
  // the stream runs what it is given, and on the CPU.
  uint64_t (*capture_id)(void* stream);

  // From now on this thread may ask for events while another one captures a graph.
  void (*ask_during_captures)();
};

// The CPU's table; the instruction set (AVX-512, AVX2, baseline) is chosen at the first call.
const Kernels& cpu();

// The name of the instruction set that cpu() uses: "avx512", "avx2" or "baseline".
const char* cpu_instruction_set();

}  // namespace zero_ext::kernels
