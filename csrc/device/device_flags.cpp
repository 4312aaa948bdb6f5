#include "device/device_flags.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "device/streams.h"

namespace zero_ext {

void DeviceFlags::add(const std::vector<int64_t>& parameters) {
  const auto count = static_cast<int64_t>(parameters.size());
  const auto options = at::TensorOptions().device(device_);
  const at::Tensor none = at::zeros({count}, options.dtype(at::kInt));
  const at::Tensor unseen = at::full({count}, nan_record::kNone, options.dtype(at::kLong));
  const auto longer = [this](const at::Tensor& flags, const at::Tensor& more) {
    return count_ == 0 ? more.clone() : at::cat({flags, more});
  };
  // Only up to here may memory run out.
  std::tie(arrivals_, sums_, first_, codes_, seen_, unseen_) =
      std::make_tuple(longer(arrivals_, none), longer(sums_, none), longer(first_, unseen),
                      longer(codes_, index(parameters).add_(nan_record::of(0, rank_, 0))),
                      at::empty({count_ + count}, options.dtype(at::kLong)),
                      at::empty({count_ + count}, options.dtype(at::kBool)));
  count_ += count;
  is_cleared_.resize(count_, 0);
}

void DeviceFlags::end_backward(int64_t micro_batch, bool direct) {
  if (count_ == 0) return;
  seen_.copy_(codes_).add_(nan_record::of(micro_batch, 0, 0));
  at::eq_out(unseen_, arrivals_, 0);
  seen_.masked_fill_(unseen_, nan_record::kNone);
  at::minimum_out(first_, first_, seen_);  // in place: a captured graph writes there
  if (direct) sums_.bitwise_or_(arrivals_);
  arrivals_.zero_();
}

void DeviceFlags::abort_backward() {
  if (count_ > 0) arrivals_.zero_();
}

std::vector<int64_t> DeviceFlags::take_arrivals() {
  std::vector<int64_t> flags;
  if (count_ == 0) return flags;
  const at::Tensor here = arrivals_.cpu();
  arrivals_.zero_();
  for (int64_t k = 0; k < count_; ++k) {
    if (here.const_data_ptr<int32_t>()[k] != 0) flags.push_back(k);
  }
  return flags;
}

void DeviceFlags::clear(int64_t k) {
  if (is_cleared_[k] == 0) cleared_.push_back(k);
  is_cleared_[k] = 1;
}

void DeviceFlags::forget_sums(const std::vector<int64_t>& flags) {
  apply_clears();  // applied later, they would clear the flags that the search sets
  zero_sums(flags);
}

void DeviceFlags::zero_sums(const std::vector<int64_t>& flags) {
  if (is_all(flags)) {
    sums_.zero_();
  } else {
    sums_.index_fill_(0, index(flags), 0);
  }
}

at::Tensor DeviceFlags::verdict(const std::vector<int64_t>& flags) {
  apply_clears();
  const auto options = at::TensorOptions().device(device_).dtype(at::kLong);
  if (flags.empty()) {
    return at::stack({at::full({}, 1, options), at::full({}, nan_record::kNone, options)});
  }
  const at::Tensor where = is_all(flags) ? at::Tensor() : index(flags);
  const at::Tensor sums = is_all(flags) ? sums_ : sums_.index_select(0, where);
  const at::Tensor first = is_all(flags) ? first_ : first_.index_select(0, where);
  const at::Tensor codes = is_all(flags) ? codes_ : codes_.index_select(0, where);
  const at::Tensor overflowed =
      at::where(sums.ne(0), codes.add(nan_record::of(nan_record::kUnknownMicroBatch, 0, 0)),
                at::Scalar(nan_record::kNone));
  return at::stack({sums.eq(0).all().to(at::kLong), at::minimum(first, overflowed).min()});
}

at::Tensor DeviceFlags::index(const std::vector<int64_t>& flags) const {
  if (capture_id(current_stream(device_)) != 0) {
    // Each replay of a graph would read the memory of the host again, which has other uses then.
    const auto options = at::TensorOptions().device(device_).dtype(at::kLong);
    std::vector<at::Tensor> each{at::empty({0}, options)};
    for (const int64_t flag : flags) each.push_back(at::full({1}, flag, options));
    return at::cat(each);
  }
  // From pinned memory, so that the host does not wait for the copy.
  return at::tensor(flags, at::kLong).pin_memory().to(device_, /*non_blocking=*/true);
}

void DeviceFlags::apply_clears() {
  if (cleared_.empty()) return;
  zero_sums(cleared_);
  if (is_all(cleared_)) {
    first_.fill_(nan_record::kNone);
  } else {
    first_.index_fill_(0, index(cleared_), nan_record::kNone);
  }
  for (const int64_t k : cleared_) is_cleared_[k] = 0;
  cleared_.clear();
}

}  // namespace zero_ext
