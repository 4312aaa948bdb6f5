// The updates of optimizers as torch.ops.zero_ext.*; see ops.cpp.
#include "python/op_call.h"

namespace zero_ext {
namespace {

using at::Tensor;
using kernels::Status;

// The arguments of both begin with these.
enum Update : size_t { kMaster, kParam, kGrad };

// A float32 buffer with one element per element of `master`; null where there is none.
float* buffer(const OpCall& call, size_t i) {
  if (!call.has(i)) return nullptr;
  check_numel(call.name(i), call.floats(i), call.tensor(kMaster).numel(), call.name(kMaster));
  return call.tensor(i).mutable_data_ptr<float>();
}

// What both updates have. `skip`: the first of the three arguments that OnDevice has.
template <class Args>
Args update_of(const OpCall& call, size_t skip) {
  const Tensor& master = call.floats(kMaster);
  Args args;
  args.master = master.mutable_data_ptr<float>();
  args.numel = master.numel();
  args.grad = buffer(call, kGrad);
  if (call.has(kParam)) {
    const Tensor& param = call.value(kParam);
    call.check_pair(kParam, param, kMaster, master);
    args.param = param.mutable_data_ptr();
    args.param_dtype = dtype_of(param.scalar_type());
  }
  args.on_device = {.skip = call.scalar<int32_t>(skip),
                    .steps_done = call.scalar<float>(skip + 1),
                    .grad_factor = call.scalar<float>(skip + 2)};
  return args;
}

// How the moments are stored.
kernels::Moments moments_of(const Tensor& exp_avg, bool has_scale) {
  const at::ScalarType dtype = exp_avg.scalar_type();
  if (dtype == at::kBFloat16) return kernels::Moments::bf16;
  TORCH_CHECK((dtype == at::kChar) == has_scale, "zero_ext: 'exp_avg' has dtype ", dtype,
              ". Pass 'exp_avg_scale' and 'exp_avg_sq_scale' with int8 codes, and only then.");
  return dtype == at::kChar ? kernels::Moments::int8 : kernels::Moments::f32;
}

// A moment with one element per element of `master`.
void* moment(const OpCall& call, size_t i, at::ScalarType dtype) {
  if (dtype == at::kFloat) return buffer(call, i);
  const Tensor& moment = call.tensor(i);
  TORCH_CHECK(
      moment.scalar_type() == dtype && moment.device() == call.device() && moment.is_contiguous(),
      "zero_ext: '", call.name(i), "' must be contiguous, of dtype ", dtype, ", on ", call.device(),
      ", beside these moments.");
  check_numel(call.name(i), moment, call.tensor(kMaster).numel(), call.name(kMaster));
  return moment.mutable_data_ptr();
}

// One scale for each block, or null.
float* scales(const OpCall& call, size_t i) {
  if (!call.has(i)) return nullptr;
  const Tensor& scale = call.floats(i);
  const int64_t numel = call.tensor(kMaster).numel();
  const int64_t blocks = (numel + kernels::kBlockElements - 1) / kernels::kBlockElements;
  TORCH_CHECK(scale.numel() == blocks, "zero_ext: '", call.name(i), "' has ", scale.numel(),
              " elements, there are ", blocks, " blocks.");
  return scale.mutable_data_ptr<float>();
}

Status adamw_(const OpCall& call) {
  enum : size_t { kFirst = kGrad + 1, kSecond, kMax, kLr, kBeta1, kBeta2, kEps, kWeightDecay };
  enum : size_t { kStep = kWeightDecay + 1, kGradScale, kMaximize, kDecoupled, kSkip };
  enum : size_t { kFirstScale = kSkip + 3, kSecondScale };
  TORCH_CHECK(call.integer(kStep) >= 1, "zero_ext: 'step' is ", call.integer(kStep),
              ", the first update is number 1.");
  auto args = update_of<kernels::AdamArgs>(call, kSkip);
  args.moments = moments_of(call.tensor(kFirst), call.has(kFirstScale));
  const bool in_codes = args.moments == kernels::Moments::int8;
  const auto values = args.moments == kernels::Moments::bf16 ? at::kBFloat16 : at::kFloat;
  TORCH_CHECK(args.moments == kernels::Moments::f32 || !call.has(kMax),
              "zero_ext: 'max_exp_avg_sq' goes with float32 moments only.");
  args.exp_avg = moment(call, kFirst, in_codes ? at::kChar : values);
  args.exp_avg_sq = moment(call, kSecond, in_codes ? at::kByte : values);
  args.exp_avg_scale = scales(call, kFirstScale);
  args.exp_avg_sq_scale = scales(call, kSecondScale);
  args.max_exp_avg_sq = buffer(call, kMax);
  args.lr = call.number(kLr);
  args.beta1 = call.number(kBeta1);
  args.beta2 = call.number(kBeta2);
  args.eps = call.number(kEps);
  args.weight_decay = call.number(kWeightDecay);
  args.step = call.integer(kStep);
  args.grad_scale = static_cast<float>(call.number(kGradScale));
  args.maximize = call.flag(kMaximize);
  args.decoupled = call.flag(kDecoupled);
  return call.kernels().adam(args, call.launch());
}

Status sgd_(const OpCall& call) {
  enum : size_t { kBuffer = kGrad + 1, kLr, kMomentum, kDampening, kWeightDecay, kNesterov };
  enum : size_t { kFirst = kNesterov + 1, kGradScale, kMaximize, kSkip };
  auto args = update_of<kernels::SgdArgs>(call, kSkip);
  TORCH_CHECK(call.number(kMomentum) == 0 || call.has(kBuffer), "zero_ext: 'momentum' is ",
              call.number(kMomentum), " and 'momentum_buffer' is None. Pass a buffer of ",
              args.numel, " elements.");
  args.momentum_buffer = buffer(call, kBuffer);
  args.lr = call.number(kLr);
  args.momentum = call.number(kMomentum);
  args.dampening = call.number(kDampening);
  args.weight_decay = call.number(kWeightDecay);
  args.nesterov = call.flag(kNesterov);
  args.first = call.flag(kFirst);
  args.grad_scale = static_cast<float>(call.number(kGradScale));
  args.maximize = call.flag(kMaximize);
  return call.kernels().sgd(args, call.launch());
}

void implement_updates(torch::Library& m) {
  implement<adamw_>(m, "adamw_");
  implement<sgd_>(m, "sgd_");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zero_ext, m) {
  m.def(
      "adamw_(Tensor(a!) master, Tensor(b!)? param, Tensor grad, Tensor(c!) exp_avg, Tensor(d!) "
      "exp_avg_sq, "
      "Tensor(e!)? max_exp_avg_sq=None, *, float lr, float beta1, float beta2, float eps, float "
      "weight_decay, "
      "int step, float grad_scale=1.0, bool maximize=False, bool decoupled=True, Tensor? "
      "skip=None, "
      "Tensor? steps_done=None, Tensor? grad_factor=None, Tensor(f!)? exp_avg_scale=None, "
      "Tensor(g!)? exp_avg_sq_scale=None) -> ()");
  m.def(
      "sgd_(Tensor(a!) master, Tensor(b!)? param, Tensor grad, Tensor(c!)? momentum_buffer=None, "
      "*, float lr, "
      "float momentum=0.0, float dampening=0.0, float weight_decay=0.0, bool nesterov=False, bool "
      "first=False, "
      "float grad_scale=1.0, bool maximize=False, Tensor? skip=None, Tensor? steps_done=None, "
      "Tensor? grad_factor=None) -> ()");
}

TORCH_LIBRARY_IMPL(zero_ext, CPU, m) { implement_updates(m); }
#if defined(ZERO_EXT_CUDA)
TORCH_LIBRARY_IMPL(zero_ext, CUDA, m) { implement_updates(m); }
#endif

}  // namespace zero_ext
