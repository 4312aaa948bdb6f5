#include "engine/changes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>

#include "core/errors.h"
#include "kernels/digest.h"

namespace zero_ext {
namespace {

constexpr int64_t kAlignmentBytes = 8;  // of what lies in a message

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
}

int64_t itemsize(at::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

}  // namespace

uint64_t part_digest(const at::Tensor& part, int64_t first) {
  const at::Tensor here = part.cpu().contiguous();
  return kernels::part_digest(here.const_data_ptr(), static_cast<int64_t>(here.nbytes()),
                              first * itemsize(here.scalar_type()), cpu_launch());
}

bool Changes::is_marked(int64_t i) const {
  const ShardedParameter& parameter = parameters_[i];
  return parameter.managed() && changes_of(parameters_.home_of(i)).can_mark();
}

at::Tensor Changes::own_part(int64_t i) const {
  if (parameters_[i].has_home()) return values_.written_part(i);
  return parameters_[i].local.detach().reshape({-1});
}

int64_t Changes::ranges_of(int64_t i) const {
  return parameters_[i].has_home() ? parameters_.home_of(i).layout().ranges() : 1;
}

uint64_t Changes::digest_of(int64_t i, const at::Tensor& part) const {
  if (!parameters_[i].has_home()) return part_digest(part, 0);
  const Piece* piece = parameters_.home_of(i).layout().own_piece(parameters_[i].slot);
  return part_digest(part, piece == nullptr ? 0 : piece->slot_begin);
}

std::shared_ptr<ChangeToken> Changes::begin() {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none(access, "change_token()");
  offloaded_.check_parameters_are_here("change_token() was called");
  auto token = std::make_shared<ChangeToken>();
  token->generation = ++generation_;
  token->digests.resize(parameters_.size());
  for (int64_t i = 0; i < parameters_.size(); ++i) {
    if (!is_marked(i)) token->digests[i] = digest_of(i, own_part(i));
  }
  end_unused();
  tokens_.push_back(token);
  for (int64_t u = 0; u < parameters_.unit_count(); ++u) {
    Unit& unit = parameters_.unit(u);
    if (!changes_of(unit).can_mark()) continue;
    changes_of(unit).begin(generation_, [&](int64_t slot) {
      return values_.written_part(parameters_.members(u)[slot]);
    });
  }
  return token;
}

void Changes::forget_unused() {
  const Access access(lock_);
  end_unused();
}

void Changes::end_unused() {
  const auto old = tokens_.size();
  std::erase_if(tokens_, [](const auto& token) { return token.expired(); });
  if (tokens_.size() == old) return;
  int64_t first = generation_ + 1;
  for (const auto& token : tokens_) {
    if (const auto used = token.lock()) first = std::min(first, used->generation);
  }
  for (const auto& unit : parameters_.units()) changes_of(*unit).end_before(first);
}

Changes::Own Changes::own_changes(int64_t i, const ChangeToken* since) const {
  Own own;
  const at::Tensor part = own_part(i);
  own.digest = digest_of(i, part);
  const ShardedParameter& parameter = parameters_[i];
  const bool in_rows = parameter.local.is_contiguous();
  if (since == nullptr || parameter.is_distributed() || !in_rows) return own;
  if (is_marked(i)) {
    Unit& unit = parameters_.home_of(i);
    own.indices = changes_of(unit).since(since->generation, parameter.slot, part);
  } else if (i < std::ssize(since->digests) && since->digests[i] == own.digest) {
    own.indices = at::empty({0}, at::kLong);
  }
  return own;
}

std::vector<int64_t> Changes::ranks_of(int64_t i) const {
  std::vector<int64_t> ranks(context_.world);
  std::iota(ranks.begin(), ranks.end(), 0);
  if (!parameters_[i].has_home()) return ranks;
  const Unit::Ranks& of_unit = parameters_.home_of(i).ranks();
  ranks.resize(of_unit.comm.world());
  for (int64_t& r : ranks) r = of_unit.place(r);
  return ranks;
}

at::ScalarType Changes::index_dtype(int64_t i) const {
  const bool fits = parameters_[i].local.numel() <= std::numeric_limits<int32_t>::max();
  return fits ? at::kInt : at::kLong;
}

std::vector<Change> Changes::count(const std::shared_ptr<ChangeToken>& since, bool wanted) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none(access, "iter_changed_params()");
  offloaded_.check_parameters_are_here("iter_changed_params() was called");
  gatherer_.serve_all(Comm::Agreement::whole_parameters);
  const int64_t size = parameters_.size();
  ++counted_;
  own_.clear();
  std::vector<int64_t> mine{since == nullptr ? 0 : since->generation, wanted ? 1 : 0};
  for (int64_t i = 0; i < size; ++i) {
    own_.push_back(own_changes(i, since.get()));
    const std::optional<at::Tensor>& indices = own_.back().indices;
    mine.push_back(indices ? indices->numel() : Change::kAll);
    mine.push_back(static_cast<int64_t>(own_.back().digest));
  }
  const auto what = [this] {
    return where(context_.global_rank) + "iter_changed_params() waited for the other ranks";
  };
  const at::Tensor all =
      comm_.all_gather(Comm::Agreement::whole_parameters, at::tensor(mine), what).cpu();
  const auto of_rank = [&](int64_t r) {
    return all.const_data_ptr<int64_t>() + r * std::ssize(mine);
  };
  wanting_.clear();
  for (int64_t r = 0; r < context_.world; ++r) {
    TORCH_CHECK(
        of_rank(r)[0] == mine[0], where(context_.global_rank),
        "iter_changed_params() has another token than on rank ", context_.global_ranks[r],
        ". Call change_token() at the same times on every rank, and pass what it returned.");
    wanting_.push_back(of_rank(r)[1] != 0);
  }
  std::vector<Change> changes;
  for (int64_t i = 0; i < size; ++i) {
    changes.push_back(agreed_change(i, [&](int64_t r) { return of_rank(r) + 2 + 2 * i; }));
  }
  return changes;
}

Change Changes::agreed_change(int64_t i, const std::function<const int64_t*(int64_t)>& of_rank) {
  const std::vector<int64_t> ranks = ranks_of(i);
  const int64_t ranges = ranges_of(i);
  Change change;
  bool known = true;
  for (int64_t first = 0; first < std::ssize(ranks); first += ranges) {
    const auto replica = std::span(ranks).subspan(first, ranges);
    std::vector<int64_t> counts;
    uint64_t digest = 0;
    for (const int64_t r : replica) {
      known = known && of_rank(r)[0] != Change::kAll;
      counts.push_back(of_rank(r)[0]);
      digest += static_cast<uint64_t>(of_rank(r)[1]);
    }
    // All ranks decide alike, also where replicas have marked other elements.
    change.numel =
        std::max(change.numel, std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    if (std::find(replica.begin(), replica.end(), context_.rank) == replica.end()) continue;
    own_[i].counts = std::move(counts);
    change.digest = digest;
  }
  const at::ScalarType dtype = parameters_[i].local.scalar_type();
  const int64_t bytes = change.numel * (itemsize(dtype) + itemsize(index_dtype(i)));
  const bool larger = bytes >= parameters_[i].local.numel() * itemsize(dtype);
  if (!known || (change.numel > 0 && larger)) change.numel = Change::kAll;
  return change;
}

Changes::Messages Changes::messages_of(const std::vector<int64_t>& indices) const {
  Messages messages;
  int64_t bytes = 0;
  for (int64_t range = 0; range < ranges_of(indices.front()); ++range) {
    std::vector<Span>& spans = messages.spans.emplace_back();
    for (const int64_t i : indices) {
      const int64_t numel = own_[i].counts[range];
      const int64_t begin = bytes;
      bytes += aligned(numel * itemsize(index_dtype(i)));
      spans.push_back({.indices = begin, .values = bytes});
      bytes += aligned(numel * itemsize(parameters_[i].local.scalar_type()));
    }
    messages.bounds.push_back(bytes);
  }
  return messages;
}

std::vector<ChangedValues> Changes::gather(const std::vector<int64_t>& indices, int64_t count) {
  const Access access(lock_);
  const at::NoGradGuard no_grad;
  backward_.check_none(access, "iter_changed_params()");
  TORCH_CHECK(count == counted_, where(context_.global_rank),
              "another iter_changed_params() of this model has begun. Finish one before the next.");
  const Unit::Ranks& ranks = parameters_.home_of(indices.front()).ranks();
  const int64_t ranges = ranges_of(indices.front());
  const Messages messages = messages_of(indices);
  const at::Tensor flat = at::empty({messages.bounds.back()}, at::kByte);
  const auto part = [&](int64_t begin, int64_t numel, at::ScalarType dtype) {
    return flat.narrow(0, begin, numel * itemsize(dtype)).view(dtype);
  };
  const int64_t own_range = ranks.comm.rank() % ranges;
  for (size_t k = 0; k < indices.size(); ++k) {
    const int64_t i = indices[k];
    const at::Tensor own = *own_[i].indices;
    const Span& span = messages.spans[own_range][k];
    const Piece* piece = parameters_.home_of(i).layout().own_piece(parameters_[i].slot);
    if (own.numel() == 0) continue;
    const at::Tensor present = values_.written_part(i);
    part(span.indices, own.numel(), index_dtype(i)).copy_(own);
    part(span.values, own.numel(), present.scalar_type())
        .copy_(present.index_select(0, own.sub(piece->slot_begin)));
  }
  std::vector<bool> wanting;
  for (int64_t r = 0; r < ranks.comm.world(); ++r) wanting.push_back(wanting_[ranks.place(r)]);
  Pending pending;
  ranks.comm.gather_parts(flat, messages.bounds, wanting, pending);
  pending.wait([&] {
    return where(context_.global_rank) + "iter_changed_params() waited for the other ranks at '" +
           parameters_[indices.front()].name + "'";
  });
  std::vector<ChangedValues> changed;
  for (size_t k = 0; k < indices.size() && wanting[ranks.comm.rank()]; ++k) {
    const int64_t i = indices[k];
    std::vector<at::Tensor> positions;
    std::vector<at::Tensor> values;
    for (int64_t range = 0; range < ranges; ++range) {
      const Span& span = messages.spans[range][k];
      const int64_t numel = own_[i].counts[range];
      positions.push_back(part(span.indices, numel, index_dtype(i)));
      values.push_back(part(span.values, numel, parameters_[i].local.scalar_type()));
    }
    changed.push_back({.indices = at::cat(positions), .values = at::cat(values)});
  }
  return changed;
}

int64_t Changes::bytes() const {
  const Access access(lock_);
  int64_t bytes = 0;
  for (const auto& unit : parameters_.units()) bytes += changes_of(*unit).bytes();
  return bytes;
}

}  // namespace zero_ext
