// Kernels: the arithmetic of zero_ext as a table of function pointers. Each device fills one table.
//
// Kernels take raw pointers, return a Status and know nothing of torch. They allocate nothing, keep
// nothing, and may be called from any thread. All lengths are 64-bit element counts. Every length
// (zero included) and every alignment is legal; 64-byte alignment is the fast path.
//
// Note [One element, one result]
// An element's result depends on the values of that element alone. Length, number of threads and
// instruction set cannot change it, nor where a shard, a vector or a thread begins. So vector
// bodies and scalar tails use the same operations: fused multiply-adds where the formula says fma,
// IEEE division and square root. Nothing is reassociated.
#pragma once

#include <cstdint>

#include "kernels/square_sum.h"
#include "kernels/words.h"

namespace zero_ext::kernels {

enum class DType : int32_t { f32, bf16, f16 };

constexpr int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

enum class Status : int32_t {
  ok,
  bad_argument,   // a combination that the kernel's comment excludes
  launch_failed,  // the device rejected the launch (CUDA only)
};

// Runs body(context, begin, end) over disjoint pieces that cover [0, numel), possibly on several
// threads, and returns when all pieces are done. `grain` is the smallest piece worth a thread.
using RangeBody = void (*)(void* context, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t numel, int64_t grain, RangeBody body, void* context);

inline void run_serially(int64_t numel, int64_t /*grain*/, RangeBody body, void* context) {
  if (numel > 0) body(context, 0, numel);
}

// Where and how a kernel runs. On CUDA every pointer of a call points to memory of the current
// device, those of `nonfinite` and OnDevice included. The call returns once the work is queued.
struct Launch {
  void* stream = nullptr;                   // cudaStream_t; unused on the CPU
  ParallelFor parallel_for = run_serially;  // CPU only
  // Where not null: receives the driver's message when launch_failed is returned.
  const char** error = nullptr;
};

// One copy of a list: `numel` elements from `source` to `target`. `nonfinite`: this segment's own
// flag, used instead of the call's.
struct CopySegment {
  const void* source;
  void* target;
  int64_t numel;
  int32_t* nonfinite = nullptr;
};

// One range of a list that is only read.
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

// Values that an update reads from device memory, so that its caller need not wait for them. Each
// pointer is null or points to one value. On the CPU they are read during the call.
struct OnDevice {
  const int32_t* skip = nullptr;  // not 0: the call writes nothing
  // The number of updates made so far; replaces `step` and `first`. It is in fp32, as torch counts
  // steps, exact up to 2^24. The powers of beta are formed by squaring, because no two libraries
  // agree about the last bit of pow.
  const float* steps_done = nullptr;
  const float* grad_factor = nullptr;  // multiplies grad_scale, in float
};

// One range of an update's list. It begins so many elements after the pointers of the arguments.
struct UpdateSegment {
  int64_t begin;   // in master, param and grad
  int64_t states;  // in the optimizer's states
  int64_t numel;
};

// How Adam's moments are stored.
enum class Moments : int32_t { f32, bf16, int8 };

// The elements of a block of int8 moments: they share a scale.
constexpr int64_t kBlockElements = 256;

// Adam and AdamW on a flat range (Kingma & Ba 2015; Loshchilov & Hutter 2019).
// All arithmetic is in fp32. Each line is one assignment, in this order:
//
//   p            = param[i] == param_dtype(master[i]) ? master[i] : float(param[i])
//   g            = (maximize ? -1 : 1) * grad_scale * grad[i]
//   decoupled:     p = p - (lr * weight_decay) * p
//   otherwise:     g = fma(weight_decay, p, g)
//   exp_avg      = fma(1 - beta1, g - exp_avg, exp_avg)
//   exp_avg_sq   = fma(1 - beta2, g * g, beta2 * exp_avg_sq)
//   amsgrad:       v = max_exp_avg_sq = max(max_exp_avg_sq, exp_avg_sq)
//   otherwise:     v = exp_avg_sq
//   p            = p - (lr / bias_correction1) * exp_avg
//                      / (sqrt(v) / sqrt(bias_correction2) + eps)
//   master[i]    = p
//   param[i]     = param_dtype(p)
//
// where bias_correctionK = 1 - betaK^step, in double. (lr * weight_decay), (lr / bias_correction1),
// (1 - betaK) and sqrt(bias_correction2) are computed in double and rounded to fp32 once.
// param_dtype() rounds to nearest even, and == compares bits. amsgrad means that max_exp_avg_sq is
// not null. Where `param` is null, p starts as master[i].
//
// The moments may be stored in fewer bits. The update then uses them before they are rounded:
//
//   bf16:  rounded up or down at random, so that the mean over steps is the value
//   int8:  codes and one scale per kBlockElements elements, see Note [Dynamic map] in moments.h;
//          the range begins where a block begins. An element's bits depend on its block.
//
// Where `segments` is not null, `count` ranges are updated instead of one of `numel` elements, in
// one parallel region or one launch. In int8, each one's states begin at a block.
//
// Note [A written parameter wins over its master]
// `param` always holds the rounding of `master`, unless somebody has written to it since. Comparing
// the two finds every kind of write; `p.data.copy_()` leaves no trace in the version counter. It
// costs no memory traffic, because the write needs the cache line of `param` anyway. Elements that
// were not written keep all bits of their master.
struct AdamArgs {
  float* master = nullptr;
  // The copy to compute with, in param_dtype; null where the master itself is the parameter.
  void* param = nullptr;
  DType param_dtype = DType::bf16;
  const float* grad = nullptr;
  Moments moments = Moments::f32;
  void* exp_avg = nullptr;     // float, bf16, or signed codes
  void* exp_avg_sq = nullptr;  // float, bf16, or unsigned codes
  // [blocks]; int8 only, else null.
  float* exp_avg_scale = nullptr;
  float* exp_avg_sq_scale = nullptr;
  float* max_exp_avg_sq = nullptr;  // AMSGrad only, else null; with f32 alone
  int64_t numel = 0;
  const UpdateSegment* segments = nullptr;  // host memory, which the caller may free at once
  int64_t count = 0;
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  int64_t step = 1;  // number of this update, from 1
  float grad_scale = 1.0F;
  bool maximize = false;
  bool decoupled = true;        // AdamW; false: Adam with weight decay in the gradient
  uint16_t* changed = nullptr;  // see changes.h; null: nobody asks
  OnDevice on_device;
};

// SGD as torch.optim.SGD. All arithmetic is in fp32. Each line is one assignment, in this order:
//
//   p            = as for Adam
//   g            = fma(weight_decay, p, (maximize ? -1 : 1) * grad_scale * grad[i])
//   momentum != 0:
//     buf        = first ? g : fma(momentum, buf, (1 - dampening) * g)
//     g          = nesterov ? fma(momentum, buf, g) : buf
//   p            = fma(-lr, g, p)
//   master[i]    = p
//   param[i]     = param_dtype(p)
//
// where `buf` is momentum_buffer[i].
struct SgdArgs {
  float* master = nullptr;
  void* param = nullptr;
  DType param_dtype = DType::bf16;
  const float* grad = nullptr;
  float* momentum_buffer = nullptr;  // null when momentum == 0
  int64_t numel = 0;
  const UpdateSegment* segments = nullptr;  // as for Adam
  int64_t count = 0;
  double lr = 0;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool first = false;
  float grad_scale = 1.0F;
  bool maximize = false;
  uint16_t* changed = nullptr;  // as for Adam
  OnDevice on_device;
};

// In every function: `nonfinite`, where not null, is set to 1 if any value read from a gradient, or
// any sum written, is NaN or infinite. Otherwise it is left alone.
struct Kernels {
  // Adds `count` gradients to a sum each, in one parallel region or one launch:
  //
  //   sum[i] = fma(scale, float(grad[i]), fresh ? 0 : sum[i])
  //
  // Memory bound: reads grad, reads (unless fresh) and writes sum. No grad and sum overlap, and no
  // two sums.
  Status (*accumulate_list)(const AccumulateSegment* segments, int64_t count, DType dtype,
                            float scale, bool fresh, int32_t* nonfinite, const Launch& launch);

  Status accumulate(const void* grad, DType dtype, float* sum, int64_t numel, float scale,
                    bool fresh, int32_t* nonfinite, const Launch& launch) const {
    const AccumulateSegment whole{.grad = grad, .sum = sum, .numel = numel};
    return accumulate_list(&whole, 1, dtype, scale, fresh, nonfinite, launch);
  }

  // Adds the gradients of all ranks to a sum, in rank order:
  //
  //   s      = fresh ? 0 : sum[i]
  //   s      = fma(scale, float(grads[rank][i]), s)     for rank = 0, 1, … ranks - 1
  //   sum[i] = s
  //
  // One rounding per rank: the bits are those of `ranks` calls of accumulate. One entry of `grads`
  // may be exactly `sum`, with dtype f32. Nothing else may overlap.
  Status (*accumulate_ranks)(const void* const* grads, int32_t ranks, DType dtype, float* sum,
                             int64_t numel, float scale, bool fresh, int32_t* nonfinite,
                             const Launch& launch);

  Status (*adam)(const AdamArgs& args, const Launch& launch);
  Status (*sgd)(const SgdArgs& args, const Launch& launch);

  // Converts between any pair of dtypes, rounding to nearest even as torch does (NaN stays NaN):
  //
  //   target[i] = target_dtype(source[i])
  //
  Status (*cast)(const void* source, DType source_dtype, void* target, DType target_dtype,
                 int64_t numel, const Launch& launch);

  // Writes gradients of `source_dtype` to their places in a flat buffer of `target_dtype`:
  //
  //   Write::overwrite:  target[i] = target_dtype(source[i])
  //   Write::add:        target[i] = target_dtype(float(target[i]) + float(source[i]))
  //
  Status (*flatten)(const CopySegment* segments, int64_t count, DType source_dtype,
                    DType target_dtype, Write write, int32_t* nonfinite, const Launch& launch);

  // Sets the flag of each segment that holds NaN or infinity to 1, and leaves the others alone.
  // Memory bound: reads the values.
  Status (*find_nonfinite)(const ReadSegment* segments, int64_t count, const Launch& launch);

  // Adds squares to a sum whose order does not matter, see Note [A norm without an order] in
  // square_sum.h:
  //
  //   *sum += Σ value[i]²
  //
  // `value` begins at a multiple of 16 elements of its parameter. `sum` is a host pointer on the
  // CPU, a device pointer on CUDA.
  Status (*add_squares)(const float* value, int64_t numel, SquareSum* sum, const Launch& launch);

  // Copies what the user wrote to a parameter into its master, see Note [A written parameter wins
  // over its master]:
  //
  //   master[i] = param[i] == param_dtype(master[i]) ? master[i] : float(param[i])
  //
  Status (*adopt_writes)(const void* param, DType param_dtype, float* master, int64_t numel,
                         const Launch& launch);

  // The norm of a sum of squares, and the factor that clips it as torch's clip_grad_norm_ does:
  //
  //   *norm   = sqrt(sum)
  //   *factor = isfinite(norm) ? min(1, max_norm / (sqrt(sum) + 1e-6)) : 1
  //
  // Both are computed in double and rounded to float once. The pointers are to host memory on the
  // CPU, to device memory on CUDA.
  Status (*clip_factor)(const SquareSum* sum, double max_norm, float* norm, float* factor,
                        const Launch& launch);

  // Shows other ranks how far this one's stream has come. What it has written until now is visible
  // to whoever has read the value:
  //
  //   *number     = next ? *number + 1 : *number
  //   *words[k]   = word_of(*number, tag)          for k = 0, 1, … count - 1
  //
  // The words may lie in the memory of other devices. `count`: at most kMostWords.
  Status (*show_words)(uint32_t* const* words, int32_t count, uint32_t* number, bool next,
                       uint32_t tag, const Launch& launch);

  // Waits until each word has come to *number. Afterwards, what their writers had written before is
  // visible. Waits no longer than `timeout_ns`, and not at all where *failed is not zero. Then, and
  // where a word has come with another tag, it sets *failed, which lies in host memory that the
  // device writes to: see late_word() and odd_word().
  Status (*await_words)(const uint32_t* words, int32_t count, const uint32_t* number, uint32_t tag,
                        int64_t timeout_ns, int32_t* failed, const Launch& launch);

  // The number of the graph that `stream` is being captured into; no two graphs share a number. 0
  // where the stream is not being captured, and on the CPU.
  uint64_t (*capture_id)(void* stream);

  // From now on this thread may query events while another thread captures a graph.
  void (*ask_during_captures)();
};

// The CPU's table. The instruction set (AVX-512, AVX2, baseline) is chosen at the first call.
const Kernels& cpu();

// The name of the instruction set that cpu() uses: "avx512", "avx2" or "baseline".
const char* cpu_instruction_set();

}  // namespace zero_ext::kernels
