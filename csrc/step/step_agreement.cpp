#include "step/step_agreement.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <exception>
#include <iterator>
#include <map>
#include <utility>

#include "comm/answers.h"
#include "comm/host_wait.h"
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
    " were written to p.grad, or the values that were written to parameters. Or a rank changed"
    " p.grad, as torch's clip_grad_norm_ does, before later backwards of other ranks.";
constexpr char kOrOtherUnits[] =
    " Or the ranks have gathered or reduced different units, as modules that run on some ranks "
    "alone"
    " do: their values were mixed then. Between hosts every rank must run the same modules.";

MicroBatches micro_batches_of(const StepQuestions& questions) {
  return questions.micro_batches ? questions.micro_batches() : MicroBatches::complete;
}

constexpr char kNothingToDivideBy[] =
    ": divide_by is 0 on all ranks together. Leave the step out, or pass the number of tokens or"
    " samples of this rank.";

// What divides and clips the gradients. `count`: the sum of all ranks' divide_by.
void decide_factor(const StepQuestions& questions, const kernels::SquareSum& sum, double count,
                   StepVerdict& verdict) {
  const double division = questions.divide_by.has_value() ? questions.averaged_over / count : 1;
  verdict.factor = static_cast<float>(division);
  if (!questions.norm()) return;
  if (division == 1) {
    verdict.factor = kernels::clipping_factor(sum, *questions.max_norm, &verdict.norm);
    return;
  }
  const double norm = std::sqrt(kernels::value_of(sum)) * division;
  verdict.norm = static_cast<float>(norm);
  const double clip = std::min(1.0, *questions.max_norm / (norm + 1e-6));
  if (std::isfinite(norm)) verdict.factor = static_cast<float>(division * clip);
}

// Of the ranks' answers [world, n]: whether ranks with the same subset, in column `begin`, have other
// digests in the next one. [1] bool.
at::Tensor differ_in_subset(const at::Tensor& answers, int64_t begin) {
  const auto pairs = [&](int64_t column) {
    const at::Tensor values = answers.select(1, column);
    return values.unsqueeze(0).eq(values.unsqueeze(1));
  };
  return pairs(begin).logical_and(pairs(begin + 1).logical_not()).any().reshape({1});
}

// The same on a device, where `verdict` has the factor that divides.
void clip_divided(const StepQuestions& questions, DeviceVerdict& verdict) {
  verdict.norm.mul_(verdict.factor[0]);
  const at::Tensor clip = verdict.norm.add(1e-6).reciprocal().mul(*questions.max_norm).clamp_max(1);
  verdict.factor = at::where(verdict.norm.isfinite(), verdict.factor.mul(clip), verdict.factor);
}

}  // namespace

StepVerdict StepAgreement::ask(Comm::Agreement about, const std::vector<int64_t>& indices,
                               const StepQuestions& questions, const Meanwhile& serve) {
  const auto ask = [&](bool last) {
    const Round round{.about = about, .serve = serve, .last = last};
    return context_.state.on_host() ? ask_host(round, indices, questions)
                                    : ask_device(round, indices, questions);
  };
  try {
    std::optional<StepVerdict> verdict = ask(/*last=*/false);
    return verdict.has_value() ? *verdict : *ask(/*last=*/true);
  } catch (const std::exception&) {
    raise_if_ranks_wait(context_.compute.device(), comm_.watch().get());
    throw;
  }
}

at::Tensor StepAgreement::gather(const Round& round, const at::Tensor& answer, int64_t state,
                                 const StepQuestions& questions) {
  if (!sends(questions)) return answer.unsqueeze(0);
  finished_.begin_agreement();
  const std::string verb = Comm::name_of(round.about);
  const auto what = [&] {
    return where(context_.global_rank) + verb + " waited for the other ranks' " + verb;
  };
  if (comm_.way().queued || round.last) return comm_.all_gather(round.about, answer, what);
  return comm_.all_gather_unless_outdated(round.about, answer, state, what, round.serve);
}

Arrival StepAgreement::arrival(MicroBatches micro_batches, int64_t values) const {
  return {.epoch = finished_.epoch(),
          .backwards = finished_.count(),
          .which = finished_.which(),
          .lost = finished_.lost(),
          .micro_batches = micro_batches,
          .values = values};
}

StepAnswer StepAgreement::own_answer(const std::vector<int64_t>& indices,
                                     const StepQuestions& questions) const {
  const NanRecords::Found found = context_.nan_records->search(
      records_of(indices, questions), [this](int64_t i) { return own_sum(i); });
  StepAnswer answer{.arrival = arrival(micro_batches_of(questions), questions.values),
                    .finite = found.finite ? 1 : 0,
                    .first_record = found.first,
                    .settings = questions.settings,
                    .written = questions.written,
                    .subset = context_.subset,
                    .of_subset = questions.of_subset,
                    .divide_by = questions.divide_by.value_or(0)};
  // One message for both questions; a second one would cost more than the norm. It has the same
  // length where no norm is asked for.
  if (questions.norm() && across_ == nullptr) add_own_squares(indices, &answer.squares);
  return answer;
}

StepAgreement::OfMeshes StepAgreement::ask_meshes(const std::vector<int64_t>& indices,
                                                  const StepQuestions& questions,
                                                  const at::Tensor& nonfinite,
                                                  bool rejected) const {
  int64_t rows = 0;
  if (questions.norm()) {
    for (const ShardedParameter& each : parameters_) rows = std::max(rows, each.norm_row + 1);
  }
  const at::Tensor own =
      at::zeros({1 + rows, kernels::kSquareSumLength},
                at::TensorOptions().dtype(at::kLong).device(context_.state.device()));
  const at::Tensor first = own[0];
  first[StepOfMesh::kNonfinite].copy_(nonfinite[0]);
  first[StepOfMesh::kRejected].fill_(rejected ? 1 : 0);
  first[StepOfMesh::kSettings].fill_(questions.settings);
  first[StepOfMesh::kRanks].fill_(1);
  auto* sums = reinterpret_cast<kernels::SquareSum*>(own.mutable_data_ptr<int64_t>());
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<int64_t> of_row;
    std::copy_if(indices.begin(), indices.end(), std::back_inserter(of_row),
                 [&](int64_t i) { return parameters_[i].norm_row == row; });
    add_own_squares(of_row, sums + 1 + row);
  }
  const at::Tensor all = across_(own);
  const at::Tensor of_mesh = all[0];
  const at::Tensor expected = of_mesh[StepOfMesh::kRanks].mul(questions.settings);
  const at::Tensor differ = of_mesh[StepOfMesh::kSettings].ne(expected);
  return {.nonfinite = of_mesh[StepOfMesh::kNonfinite].ne(0).reshape({1}),
          .differ = differ.logical_or(of_mesh[StepOfMesh::kRejected].ne(0)).reshape({1}),
          .squares = all.narrow(0, 1, rows).sum(0).contiguous()};
}

void StepAgreement::check_same_backwards(const Round& round,
                                         const std::vector<Arrival>& arrivals) const {
  const Arrival& own = arrivals[std::ssize(arrivals) == 1 ? 0 : context_.rank];
  int64_t epoch = 0;
  for (const Arrival& each : arrivals) epoch = std::max(epoch, each.epoch);
  const auto other = std::find_if(arrivals.begin(), arrivals.end(), [&](const Arrival& each) {
    return each.backwards != own.backwards || each.which != own.which;
  });
  const int64_t count = own.backwards;
  finished_.set_epoch(epoch);
  TORCH_CHECK(other == arrivals.end(), where(context_.global_rank), Comm::name_of(round.about),
              kOutOfStep, " This rank has finished ", count, ", rank ",
              comm_.global_rank(other - arrivals.begin()), " ", other->backwards,
              other->backwards == count ? " others." : ".");
}

std::optional<StepVerdict> StepAgreement::ask_host(const Round& round,
                                                   const std::vector<int64_t>& indices,
                                                   const StepQuestions& questions) {
  const StepAnswer own = own_answer(indices, questions);
  const at::Tensor messages = gather(round, message_of(own), StepAnswer::kWhich, questions);
  if (!messages.defined()) return std::nullopt;
  const std::vector<StepAnswer> answers = answers_of<StepAnswer>(messages);
  std::vector<Arrival> arrivals;
  for (const StepAnswer& answer : answers) arrivals.push_back(answer.arrival);
  check_same_backwards(round, arrivals);
  StepVerdict verdict;
  int64_t first = own.first_record;
  double count = 0;
  kernels::SquareSum sum{};
  std::map<int64_t, int64_t> of_subsets;
  for (int64_t r = 0; r < std::ssize(answers); ++r) {
    const StepAnswer& answer = answers[r];
    verdict.nonfinite = verdict.nonfinite || answer.finite == 0;
    first = std::min(first, answer.first_record);
    verdict.settings_differ = verdict.settings_differ || answer.settings != own.settings;
    verdict.written_differ = verdict.written_differ || answer.written != own.written;
    if (context_.subset >= 0) {
      const int64_t in_subset = of_subsets.emplace(answer.subset, answer.of_subset).first->second;
      verdict.subset_differs = verdict.subset_differs || answer.of_subset != in_subset;
    }
    verdict.values_differ = verdict.values_differ || answer.arrival.values != own.arrival.values;
    count += answer.divide_by;
    if (replicated() || !context_.shares_replica_with(r)) continue;
    for (int64_t k = 0; k < std::ssize(sum); ++k) sum[k] += answer.squares[k];
  }
  const Completeness complete = completeness_of(arrivals);
  if (asks_meshes(questions)) {
    const bool rejected = verdict.settings_differ || verdict.written_differ ||
                          verdict.values_differ || verdict.subset_differs ||
                          complete.unreduced >= 0 || complete.too_few >= 0 ||
                          complete.changed_too_early >= 0;
    const at::Tensor nonfinite = at::full({1}, verdict.nonfinite, at::kBool);
    const OfMeshes meshes = ask_meshes(indices, questions, nonfinite, rejected);
    verdict.nonfinite = meshes.nonfinite.item<bool>();
    verdict.meshes_differ = !rejected && meshes.differ.item<bool>();
    std::copy_n(meshes.squares.const_data_ptr<int64_t>(), sum.size(), sum.begin());
  }
  const auto named = [this](int64_t rank) { return rank < 0 ? -1 : comm_.global_rank(rank); };
  verdict.incomplete = named(complete.unreduced >= 0 ? complete.unreduced : complete.too_few);
  verdict.changed_too_early = named(complete.changed_too_early);
  // A step in which no rank has data changes nothing.
  if (count == 0 && !has_gradients(indices)) count = 1;
  TORCH_CHECK(!questions.divide_by.has_value() || count > 0, where(context_.global_rank),
              Comm::name_of(round.about), kNothingToDivideBy);
  const bool own_has_all = replicated() && across_ == nullptr;
  decide_factor(questions, own_has_all ? own.squares : sum, count, verdict);
  if (verdict.nonfinite && first != nan_record::kNone) describe(first, verdict);
  return verdict;
}

void StepAgreement::describe(int64_t first, StepVerdict& verdict) const {
  verdict.rank = comm_.global_rank(nan_record::rank(first));
  verdict.parameter = parameters_[nan_record::parameter(first)].name;
  const int64_t micro_batch = nan_record::micro_batch(first);
  verdict.micro_batch = micro_batch == nan_record::kUnknownMicroBatch ? -1 : micro_batch;
}

at::Tensor StepAgreement::device_answer(const std::vector<int64_t>& indices,
                                        const StepQuestions& questions) const {
  const auto options = at::TensorOptions().device(context_.compute.device());
  const at::Tensor nonfinite_answer = context_.nan_records->search_on_device(
      records_of(indices, questions), [this](int64_t i) { return own_sum(i); });
  const at::Tensor squares =
      at::zeros({questions.norm() ? kernels::kSquareSumLength : 0}, options.dtype(at::kLong));
  if (questions.norm() && across_ == nullptr) {
    add_own_squares(indices,
                    reinterpret_cast<kernels::SquareSum*>(squares.mutable_data_ptr<int64_t>()));
  }
  // One number for all: each more is another launch.
  const auto agreed = static_cast<int64_t>(
      static_cast<uint64_t>(questions.settings) + static_cast<uint64_t>(finished_.which()) +
      static_cast<uint64_t>(questions.written) + static_cast<uint64_t>(questions.values) +
      static_cast<uint64_t>(comm_.collectives()) + (finished_.changed_too_early() ? 1 : 0));
  const int64_t count = std::bit_cast<int64_t>(questions.divide_by.value_or(0));
  const auto number = [&](int64_t value) { return at::full({1}, value, options.dtype(at::kLong)); };
  std::vector<at::Tensor> parts_of_answer{nonfinite_answer, number(agreed), squares};
  if (context_.subset >= 0) {
    parts_of_answer.push_back(number(context_.subset));
    parts_of_answer.push_back(number(questions.of_subset));
  }
  if (questions.divide_by.has_value()) parts_of_answer.push_back(number(count));
  return at::cat(parts_of_answer);
}

std::optional<StepVerdict> StepAgreement::ask_device(const Round& round,
                                                     const std::vector<int64_t>& indices,
                                                     const StepQuestions& questions) {
  const auto options = at::TensorOptions().device(context_.compute.device());
  const at::Tensor answer = device_answer(indices, questions);
  const at::Tensor all = gather(round, answer, DeviceAnswer::kAgreed, questions);
  if (!all.defined()) return std::nullopt;
  auto verdict = std::make_shared<DeviceVerdict>();
  const at::Tensor agreement = all.select(1, DeviceAnswer::kAgreed);
  at::Tensor out_of_step = agreement.min().ne(agreement.max()).reshape({1});
  at::Tensor squares =
      answer.narrow(0, DeviceAnswer::kSquares, questions.norm() ? kernels::kSquareSumLength : 0);
  if (context_.subset >= 0) {
    out_of_step =
        out_of_step.logical_or(differ_in_subset(all, DeviceAnswer::kSquares + squares.numel()));
  }
  at::Tensor nonfinite = all.select(1, DeviceAnswer::kFinite).min().eq(0).reshape({1});
  if (asks_meshes(questions)) {
    const OfMeshes meshes = ask_meshes(indices, questions, nonfinite, /*rejected=*/false);
    nonfinite = meshes.nonfinite;
    out_of_step = out_of_step.logical_or(meshes.differ);
    squares = meshes.squares;
  }
  verdict->skip = nonfinite.logical_or(out_of_step).to(at::kInt);
  const at::Tensor first = all.select(1, DeviceAnswer::kFirstRecord).min().reshape({1});
  if (questions.norm()) {
    if (!replicated() && across_ == nullptr) {
      const at::Tensor parts = all.narrow(0, context_.first_of_replica(), context_.shards);
      squares = parts.narrow(1, DeviceAnswer::kSquares, squares.numel()).sum(0).contiguous();
    }
    verdict->norm = at::empty({}, options.dtype(at::kFloat));
    verdict->factor = at::empty({1}, options.dtype(at::kFloat));
    check(context_.state->clip_factor(
              reinterpret_cast<const kernels::SquareSum*>(squares.const_data_ptr<int64_t>()),
              *questions.max_norm, verdict->norm.mutable_data_ptr<float>(),
              verdict->factor.mutable_data_ptr<float>(), context_.state.launch()),
          "clip_factor");
  }
  if (questions.divide_by.has_value()) {
    verdict->factor = division(all.select(1, all.size(1) - 1), questions);
    if (questions.norm()) clip_divided(questions, *verdict);
  }
  record(out_of_step, nonfinite, first, *verdict);
  return StepVerdict{.on_device = std::move(verdict)};
}

void StepAgreement::record(const at::Tensor& out_of_step, const at::Tensor& nonfinite,
                           const at::Tensor& first, DeviceVerdict& verdict) const {
  const at::Tensor code = at::where(
      out_of_step, at::Scalar(nan_record::kOutOfStep),
      at::where(nonfinite, first.clamp_max(nan_record::kElsewhere), at::Scalar(nan_record::kNone)));
  verdict.nan_record = at::empty({1}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  verdict.nan_record.copy_(code, /*non_blocking=*/true);
  const c10::Device device = context_.compute.device();
  verdict.known = c10::Event(device.type());
  verdict.known.record(current_stream(device));
  verdict.watch = comm_.watch();
}

at::Tensor StepAgreement::division(const at::Tensor& counts, const StepQuestions& questions) {
  const at::Tensor count = counts.contiguous().view(at::kDouble).sum().reshape({1});
  return count.reciprocal().mul(questions.averaged_over).to(at::kFloat);
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

bool StepAgreement::has_gradients(const std::vector<int64_t>& indices) const {
  return std::any_of(indices.begin(), indices.end(), [this](int64_t i) {
    return parameters_[i].managed() && !parameters_.sums_of(i).fresh(parameters_[i].slot);
  });
}

std::optional<kernels::ReadSegment> StepAgreement::own_sum(int64_t i) const {
  const int64_t slot = parameters_[i].slot;
  const GradientSums& sums = parameters_.sums_of(i);
  const Piece* piece = parameters_.unit(parameters_[i].unit).layout().own_piece(slot);
  if (sums.fresh(slot) || piece == nullptr) return std::nullopt;
  return kernels::ReadSegment{.value = sums.reduced(slot), .numel = piece->numel};
}

void StepAgreement::settle(StepVerdict& verdict) const {
  // With other ranks also afterwards: it raises what a collective before it has failed with.
  if (!verdict.is_settled() || comm_.watch() != nullptr) verdict.on_device->wait();
  const int64_t first = *verdict.on_device->nan_record.const_data_ptr<int64_t>();
  TORCH_CHECK(first != nan_record::kOutOfStep, where(context_.global_rank), "a step was skipped",
              kOutOfStep, kOrOtherSettings, comm_.way().one_host ? "" : kOrOtherUnits);
  verdict.nonfinite = first != nan_record::kNone;
  if (verdict.nonfinite && first != nan_record::kElsewhere) describe(first, verdict);
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
