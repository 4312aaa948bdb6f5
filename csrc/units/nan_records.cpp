#include "units/nan_records.h"

#include <algorithm>
#include <iterator>

namespace zero_ext {

NanRecords::NanRecords(const KernelTable& compute, const KernelTable& state, int64_t rank)
    : state_(state), rank_(rank) {
  if (!compute.on_host()) flags_.emplace(compute.device(), rank);
}

void NanRecords::add(const std::vector<int64_t>& parameters) {
  if (flags_.has_value()) flags_->add(parameters);  // memory may run out
  parameters_.insert(parameters_.end(), parameters.begin(), parameters.end());
  first_micro_batch_.resize(parameters_.size(), kNever);
  suspected_.resize(parameters_.size(), 0);
}

void NanRecords::saw_in_gradient(int64_t k) {
  if (first_micro_batch_[k] == kNever) first_micro_batch_[k] = micro_batch_;
}

void NanRecords::clear(int64_t k) {
  first_micro_batch_[k] = kNever;
  suspected_[k] = 0;
  if (flags_.has_value()) flags_->clear(k);
}

void NanRecords::begin_backward(int64_t micro_batch) {
  micro_batch_ = micro_batch;
  if (flags_.has_value()) flags_->begin_backward();
}

void NanRecords::end_gradients() {
  if (!flags_.has_value() || !state_.on_host()) return;
  for (const int64_t k : flags_->take_arrivals()) saw_in_gradient(k);
}

void NanRecords::end_backward(bool direct) {
  if (!state_.on_host()) flags_->end_backward(micro_batch_, direct);
}

void NanRecords::abort_backward() {
  if (flags_.has_value()) flags_->abort_backward();
  std::replace(first_micro_batch_.begin(), first_micro_batch_.end(), micro_batch_, kNever);
}

NanRecords::Found NanRecords::search(const std::vector<int64_t>& records,
                                     const SumOf& sum_of) const {
  Found found;
  for (const int64_t k : records) {
    int32_t nonfinite = 0;
    std::optional<kernels::ReadSegment> sum;
    if (suspected_[k] != 0) sum = sum_of(parameters_[k]);
    if (sum.has_value()) {
      sum->nonfinite = &nonfinite;
      check(state_->find_nonfinite(&*sum, 1, state_.launch()), "find_nonfinite");
    }
    if (nonfinite != 0) found.finite = false;
    const int64_t micro_batch = first_micro_batch_[k];
    if (nonfinite == 0 && micro_batch == kNever) continue;
    found.first = std::min(
        found.first,
        nan_record::of(micro_batch == kNever ? nan_record::kUnknownMicroBatch : micro_batch, rank_,
                       parameters_[k]));
  }
  return found;
}

at::Tensor NanRecords::search_on_device(const std::vector<int64_t>& records, const SumOf& sum_of) {
  std::vector<int64_t> written;
  std::vector<kernels::ReadSegment> sums;
  for (const int64_t k : records) {
    if (suspected_[k] == 0) continue;
    suspected_[k] = 0;
    written.push_back(k);
    if (std::optional<kernels::ReadSegment> sum = sum_of(parameters_[k])) {
      sum->nonfinite = flags_->sum(k);
      sums.push_back(*sum);
    }
  }
  if (!written.empty()) {
    flags_->forget_sums(written);
    check(state_->find_nonfinite(sums.data(), std::ssize(sums), state_.launch()), "find_nonfinite");
  }
  return flags_->verdict(records);
}

}  // namespace zero_ext
