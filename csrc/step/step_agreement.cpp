#include "step/step_agreement.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "device/kernel_table.h"

namespace zero_ext {
namespace {

constexpr char kOutOfStep[] =
    ": the ranks have finished different backwards since the last step: one threw on a rank after"
    " the others had its gradients, or only some ranks called zero_grad(). Call"
    " zero_grad(set_to_none=True) on every rank and repeat the step's backwards.";
constexpr char kOrOtherSettings[] =
    " Or the optimizers' settings (lr, weight_decay, …) differ between ranks, or the gradients that"
    " were written to p.grad.";

}  // namespace

at::Tensor StepAgreement::gather(Comm::Agreement about, const at::Tensor& answer,
                                 const StepQuestions& questions) {
  if (context_.world == 1 || (replicated() && !questions.nonfinite)) return answer.unsqueeze(0);
  const std::string verb = Comm::name_of(about);
  return comm_.all_gather(about, answer, [&] {
    return where(context_.global_rank) + verb + " waited for the other ranks' " + verb;
  });
}

StepVerdict StepAgreement::ask_host(Comm::Agreement about, const std::vector<int64_t>& indices,
                                    const StepQuestions& questions) {
  const NanRecords::Found found = context_.nan_records->search(
      records_of(indices, questions), [this](int64_t i) { return own_sum(i); });
  int64_t finite = found.finite ? 1 : 0;
  int64_t first = found.first;
  // One message for both questions; a second one would cost more than the norm.
  kernels::SquareSum sum{};
  if (questions.norm()) add_own_squares(indices, &sum);
  constexpr int64_t kFacts = 7;
  // Also where no norm is asked for: a message has the same length in every call.
  constexpr int64_t kLength = kFacts + kernels::kSquareSumLength;
  const at::Tensor own = at::empty({kLength}, at::TensorOptions().dtype(at::kLong));
  auto* value = own.mutable_data_ptr<int64_t>();
  value[0] = finite;
  value[1] = first;
  value[2] = finished_.count();
  value[3] = finished_.epoch();
  value[4] = questions.settings;
  value[5] = finished_.which();
  value[6] = questions.written;
  std::copy(sum.begin(), sum.end(), value + kFacts);
  const at::Tensor all = gather(about, own, questions);
  if (!replicated()) sum = {};
  int64_t epoch = 0;
  int64_t other = -1;  // a rank that has finished other backwards
  StepVerdict verdict;
  for (int64_t r = 0; r < all.size(0); ++r) {
    const int64_t* answer = all.const_data_ptr<int64_t>() + r * kLength;
    finite = std::min(finite, answer[0]);
    first = std::min(first, answer[1]);
    const bool same = answer[2] == value[2] && answer[5] == value[5];
    if (!same && other < 0) other = r;
    epoch = std::max(epoch, answer[3]);
    verdict.settings_differ = verdict.settings_differ || answer[4] != value[4];
    verdict.written_differ = verdict.written_differ || answer[6] != value[6];
    if (replicated() || !context_.shares_replica_with(r)) continue;
    for (int64_t k = kFacts; k < kLength; ++k) sum[k - kFacts] += answer[k];
  }
  finished_.set_epoch(epoch);
  if (other >= 0) {
    const int64_t theirs = all.const_data_ptr<int64_t>()[other * kLength + 2];
    TORCH_CHECK(false, where(context_.global_rank), Comm::name_of(about), kOutOfStep,
                " This rank has finished ", value[2], ", rank ", comm_.global_rank(other), " ",
                theirs, theirs == value[2] ? " others." : ".");
  }
  verdict.nonfinite = finite == 0;
  if (questions.norm()) {
    verdict.factor = kernels::clipping_factor(sum, *questions.max_norm, &verdict.norm);
  }
  if (verdict.nonfinite && first != nan_record::kNone) describe(first, verdict);
  return verdict;
}

void StepAgreement::describe(int64_t first, StepVerdict& verdict) const {
  verdict.rank = comm_.global_rank(nan_record::rank(first));
  verdict.parameter = parameters_[nan_record::parameter(first)].name;
  const int64_t micro_batch = nan_record::micro_batch(first);
  verdict.micro_batch = micro_batch == nan_record::kUnknownMicroBatch ? -1 : micro_batch;
}

StepVerdict StepAgreement::ask_device(Comm::Agreement about, const std::vector<int64_t>& indices,
                                      const StepQuestions& questions) {
  const c10::Device device = context_.compute.device();
  const auto options = at::TensorOptions().device(device);
  const at::Tensor nonfinite_answer = context_.nan_records->search_on_device(
      records_of(indices, questions), [this](int64_t i) { return own_sum(i); });
  at::Tensor squares =
      at::zeros({questions.norm() ? kernels::kSquareSumLength : 0}, options.dtype(at::kLong));
  if (questions.norm()) {
    add_own_squares(indices,
                    reinterpret_cast<kernels::SquareSum*>(squares.mutable_data_ptr<int64_t>()));
  }
  // One number for all: each more is another launch.
  const auto agreed = static_cast<int64_t>(static_cast<uint64_t>(questions.settings) +
                                           static_cast<uint64_t>(finished_.which()) +
                                           static_cast<uint64_t>(questions.written));
  const at::Tensor all = gather(
      about, at::cat({nonfinite_answer, at::full({1}, agreed, options.dtype(at::kLong)), squares}),
      questions);
  auto verdict = std::make_shared<DeviceVerdict>();
  const at::Tensor agreement = all.select(1, 2);
  const at::Tensor out_of_step = agreement.min().ne(agreement.max()).reshape({1});
  const at::Tensor nonfinite = all.select(1, 0).min().eq(0).reshape({1});
  verdict->skip = nonfinite.logical_or(out_of_step).to(at::kInt);
  const at::Tensor first = all.select(1, 1).min().reshape({1});
  if (questions.norm()) {
    if (!replicated()) {
      const at::Tensor parts = all.narrow(0, context_.first_of_replica(), context_.shards);
      squares = parts.slice(1, 3).sum(0).contiguous();
    }
    verdict->norm = at::empty({}, options.dtype(at::kFloat));
    verdict->factor = at::empty({1}, options.dtype(at::kFloat));
    check(context_.state->clip_factor(
              reinterpret_cast<const kernels::SquareSum*>(squares.const_data_ptr<int64_t>()),
              *questions.max_norm, verdict->norm.mutable_data_ptr<float>(),
              verdict->factor.mutable_data_ptr<float>(), context_.state.launch()),
          "clip_factor");
  }
  const at::Tensor record = at::where(out_of_step, at::Scalar(nan_record::kOutOfStep),
                                      at::where(nonfinite, first, at::Scalar(nan_record::kNone)));
  verdict->nan_record = at::empty({1}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  verdict->nan_record.copy_(record, /*non_blocking=*/true);
  verdict->known = c10::Event(device.type());
  verdict->known.record(current_stream(device));
  return {.on_device = std::move(verdict)};
}

std::vector<int64_t> StepAgreement::records_of(const std::vector<int64_t>& indices,
                                               const StepQuestions& questions) const {
  std::vector<int64_t> records;
  if (!questions.nonfinite) return records;
  records.reserve(indices.size());
  for (const int64_t i : indices) {
    if (parameters_[i].managed()) records.push_back(parameters_.record_of(i));
  }
  return records;
}

std::optional<kernels::ReadSegment> StepAgreement::own_sum(int64_t i) const {
  const int64_t slot = parameters_[i].slot;
  const GradientSums& sums = parameters_.sums_of(i);
  const Piece* piece = parameters_.unit(parameters_[i].unit).layout().own_piece(slot);
  if (sums.fresh(slot) || piece == nullptr) return std::nullopt;
  return kernels::ReadSegment{.value = sums.reduced(slot), .numel = piece->numel};
}

void StepAgreement::settle(StepVerdict& verdict) const {
  if (!verdict.is_settled()) verdict.on_device->known.synchronize();
  const int64_t first = *verdict.on_device->nan_record.const_data_ptr<int64_t>();
  TORCH_CHECK(first != nan_record::kOutOfStep, where(context_.global_rank), "a step was skipped",
              kOutOfStep, kOrOtherSettings);
  verdict.nonfinite = first != nan_record::kNone;
  if (verdict.nonfinite) describe(first, verdict);
}

void StepAgreement::add_own_squares(const std::vector<int64_t>& indices,
                                    kernels::SquareSum* sum) const {
  parameters_.for_each_summed_run(indices, [&](const GradientSums& sums, const Run& run) {
    // Groups of elements are those of each slot alone: slots begin where groups do, behind
    // zeros.
    TORCH_INTERNAL_ASSERT(run.begin % kernels::kSquareGroupNumel == 0);
    check(context_.state->add_squares(sums.data() + run.begin, run.numel, sum,
                                      context_.state.launch()),
          "add_squares");
  });
}

}  // namespace zero_ext
