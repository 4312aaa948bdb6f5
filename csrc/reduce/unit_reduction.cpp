#include "reduce/unit_reduction.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <utility>

#include "comm/current_call.h"
#include "comm/host_wait.h"
#include "core/errors.h"
#include "device/kernel_table.h"
#include "memory/storage.h"
#include "units/nan_records.h"

namespace zero_ext {
namespace {

// A flags message: the number of the backward, the unit's index, the dtype of its sender's gradients,
// with which backwards its sender's steps were made, then one byte per slot, then its late units.
constexpr int64_t kFlagsHeader = 4;
constexpr int64_t kFlagsHeaderBytes = kFlagsHeader * sizeof(int64_t);

// Of a window's beginning and of the parts that are received of it.
constexpr int64_t kWindowAlignmentBytes = 64;

std::array<int64_t, kFlagsHeader> header_of(const at::Tensor& flags) {
  std::array<int64_t, kFlagsHeader> header;
  std::memcpy(header.data(), flags.const_data_ptr<uint8_t>(), kFlagsHeaderBytes);
  return header;
}

}  // namespace

void UnitReduction::lend_message() {
  const at::ScalarType dtype = unit_.message_dtype();
  const int64_t numel = unit_.layout().padded_numel();
  if (pulls()) {
    message_ = comm_.peer_memory()->next(dtype, numel);
  } else {
    bucket_->wait_until_unused();
    message_ = bucket_->gradients(dtype, numel);
  }
  unit_.intake().lend_message(message_);
}

void UnitReduction::start(int64_t backward, int32_t steps, std::vector<uint8_t> late) {
  backward_ = backward;
  steps_ = steps;
  late_ = std::move(late);
  unit_.intake().fill_message();
  const SideStream::Scope beside(context_.reducing);
  start_window(window_from(0));
}

UnitReduction::Window UnitReduction::window_from(int64_t begin) const {
  const int64_t left = range_numel() - begin;
  const bool receives = context_.reduction == Reduction::exchange && context_.world > 1 &&
                        (!pulls() || context_.offloads());
  if (!receives) return {begin, left};
  const auto itemsize = static_cast<int64_t>(message_.element_size());
  const int64_t alignment = kWindowAlignmentBytes / itemsize;
  const auto message_bytes = static_cast<int64_t>(message_.nbytes());
  const int64_t bytes = std::max(message_bytes, context_.window_bytes);
  const int64_t most = bytes / itemsize / places() / alignment * alignment;
  return {begin, std::min(left, std::max(most, alignment))};
}

void UnitReduction::start_window(Window window) {
  window_ = window;
  if (pulls()) {
    start_pulled();
  } else if (context_.reduction == Reduction::exchange) {
    start_exchange();
  } else {
    start_collective();
  }
  if (context_.offloads()) send_to_host();
}

void UnitReduction::start_exchange() {
  const int64_t world = context_.world;
  const int64_t rank = context_.rank;
  const RankLayout& layout = unit_.layout();
  const int64_t part = window_.numel;
  const auto outgoing = [&](int64_t range) {
    return message_.narrow(0, layout.range_begin(range) + window_.begin, part);
  };
  // One place per rank where the sums are offloaded: this rank's own part goes there, too.
  const bool offloads = context_.offloads();
  const int64_t received_numel = places() * part;
  const at::ScalarType dtype = message_.scalar_type();
  const at::Tensor received = offloads && comm_.way().queued
                                  ? context_.on_device(received_numel, dtype)
                                  : bucket_->received(dtype, received_numel);
  std::vector<at::Tensor> sends(world);
  std::vector<at::Tensor> recvs(world);
  sources_.assign(world, at::Tensor());
  int64_t next = 0;
  for (int64_t peer = 0; peer < world; ++peer) {
    if (peer == rank && offloads) ++next;
    if (peer == rank) continue;
    sends[peer] = outgoing(peer % layout.ranges());
    recvs[peer] = received.narrow(0, next++ * part, part);
    sources_[peer] = recvs[peer];
  }
  sources_[rank] = outgoing(layout.own_range());
  // Numbered by backward and unit, so that a reduction that a failed backward left behind matches
  // no later one. Windows of a reduction arrive in the order in which they were sent. Messages of
  // different lengths never meet, see Note [Mixed messages].
  const int64_t tag = kReductionTags * (backward_ * kMaxUnits + unit_.index());
  if (brings_flags(context_, comm_) && !knows_users()) exchange_flags(tag);
  comm_.exchange(sends, recvs, backward_, tag + (dtype == at::kFloat ? 2 : 1), pending_);
}

void UnitReduction::start_pulled() {
  if (!slot_.has_value()) slot_ = comm_.show_filled(message_, pending_);
  const RankLayout& layout = unit_.layout();
  const int64_t begin = layout.range_begin(layout.own_range()) + window_.begin;
  sources_.clear();
  for (int64_t peer = 0; peer < context_.world; ++peer) {
    sources_.push_back(
        comm_.peer_memory()->part(*slot_, peer, message_.scalar_type(), begin, window_.numel));
  }
}

void UnitReduction::leave_slot() {
  if (slot_.has_value()) comm_.peer_memory()->show_read(*slot_);
}

void UnitReduction::exchange_flags(int64_t tag) {
  const int64_t rank = context_.rank;
  const int64_t slots = unit_.layout().size();
  flags_.assign(context_.world, at::Tensor());
  const int64_t late_begin = kFlagsHeaderBytes + slots;
  for (at::Tensor& flags : flags_) flags = at::empty({late_begin + std::ssize(late_)}, at::kByte);
  auto* mine = flags_[rank].mutable_data_ptr<uint8_t>();
  const int64_t header[kFlagsHeader] = {backward_, unit_.index(),
                                        static_cast<int64_t>(message_.scalar_type()), steps_};
  std::memcpy(mine, header, kFlagsHeaderBytes);
  for (int64_t i = 0; i < slots; ++i)
    mine[kFlagsHeaderBytes + i] = unit_.intake().contributes(i) ? 1 : 0;
  std::copy(late_.begin(), late_.end(), mine + late_begin);
  comm_.exchange(std::vector<at::Tensor>(context_.world, flags_[rank]), flags_, backward_, tag,
                 pending_flags_);
}

float UnitReduction::headroom() const {
  const bool sums_in_fp16 =
      context_.reduction == Reduction::collective && message_.scalar_type() == at::kHalf;
  return sums_in_fp16 ? static_cast<float>(std::bit_ceil(static_cast<uint64_t>(context_.world)))
                      : 1.0F;
}

void UnitReduction::start_collective() {
  const RankLayout& layout = unit_.layout();
  if (headroom() != 1) message_.div_(headroom());
  if (layout.ranges() == 1) {
    comm_.all_reduce_sum(message_, pending_);
    sources_.assign(1, message_);
    return;
  }
  // Not among the received: those may lie on the host, where no device's backend can write.
  const at::ScalarType dtype = message_.scalar_type();
  const at::Tensor sum = context_.offloads() && comm_.way().queued
                             ? context_.on_device(layout.range_numel(), dtype)
                             : bucket_->received(dtype, layout.range_numel());
  comm_.reduce_scatter(message_, sum, pending_);
  sources_.assign(1, sum);
}

void UnitReduction::send_to_host() {
  // What other ranks send through host memory arrives there; a sum is not there before it is.
  if (comm_.way().queued || context_.reduction == Reduction::collective) wait(pending_);
  const int64_t part = window_.numel;
  const auto count = static_cast<int64_t>(sources_.size());
  const at::Tensor received = bucket_->received(message_.scalar_type(), count * part);
  for (int64_t k = 0; k < count; ++k) {
    if (sources_[k].is_cpu()) continue;
    const at::Tensor here = received.narrow(0, k * part, part);
    copy_bytes(here.mutable_data_ptr(), here.device(), sources_[k].const_data_ptr(),
               sources_[k].device(), here.nbytes());
    sources_[k] = here;
  }
  const c10::Stream stream = current_stream(context_.compute.device());
  sent_to_host_.emplace(stream.device_type());
  sent_to_host_->record(stream);
}

void UnitReduction::wait(Pending& pending) {
  const CallScope call("a backward");
  pending.wait([this] { return waiting(); });
}

std::string UnitReduction::waiting() const {
  return where(context_.global_rank, unit_.name()) + "waited for its reduction in backward " +
         std::to_string(backward_);
}

std::unique_ptr<Bucket> UnitReduction::finish(float scale) {
  const SideStream::Scope beside(context_.reducing);
  if (knows_users()) {
    wait(pending_flags_);
    check_flags();
    if (message_.scalar_type() != at::kFloat) send_in_fp32_if_others_do();
  }
  wait(pending_);
  scale *= headroom();
  const std::vector<Run> runs = this->runs();
  unit_.sums().begin_adding();
  await_copies();
  add_window(runs, scale);
  while (window_.end() < range_numel()) {
    start_window(window_from(window_.end()));
    wait(pending_);
    await_copies();
    add_window(runs, scale);
  }
  leave_slot();
  unit_.sums().end_adding();
  for (int64_t i = 0; knows_users() && i < unit_.layout().size(); ++i) {
    if (is_used(i)) unit_.sums().mark_summed(i);
  }
  unit_.intake().return_message();
  bucket_->mark_used();
  return std::move(bucket_);
}

void UnitReduction::check_flags() {
  for (int64_t peer = 0; peer < context_.world; ++peer) {
    const std::array<int64_t, kFlagsHeader> header = header_of(flags_[peer]);
    const int64_t name = context_.global_ranks.empty() ? peer : context_.global_ranks[peer];
    TORCH_CHECK(header[0] == backward_ && header[1] == unit_.index(),
                where(context_.global_rank, unit_.name()), "this rank reduces unit ", unit_.index(),
                " of backward ", backward_, ", rank ", name, " sent unit ", header[1],
                " of backward ", header[0],
                ". Every rank must run the same backwards in the same order.");
    TORCH_CHECK(header[3] == steps_, where(context_.global_rank, unit_.name()), "rank ", name,
                kOtherSteps);
    const uint8_t* end = flags_[peer].const_data_ptr<uint8_t>() + flags_[peer].numel();
    std::transform(late_.begin(), late_.end(), end - late_.size(), late_.begin(), std::bit_or());
  }
}

void UnitReduction::send_in_fp32_if_others_do() {
  bool any = false;
  for (int64_t peer = 0; peer < context_.world; ++peer) {
    if (header_of(flags_[peer])[2] == static_cast<int64_t>(message_.scalar_type())) continue;
    any = true;
    pending_.abandon(comm_.global_rank(peer));
  }
  if (!any) return;
  wait(pending_);  // the ranks that sent the same dtype still read and write these buffers
  await_copies();
  message_ = message_.to(at::kFloat);
  start_window(window_from(0));
}

bool UnitReduction::may_be_used_by(int64_t source, int64_t i) const {
  if (!knows_users()) return true;  // a rank that did not use the slot sent zeros
  return flags_[source].const_data_ptr<uint8_t>()[kFlagsHeaderBytes + i] != 0;
}

bool UnitReduction::is_used(int64_t i) const {
  for (int64_t source = 0; source < std::ssize(sources_); ++source) {
    if (may_be_used_by(source, i)) return true;
  }
  return false;
}

std::vector<Run> UnitReduction::runs() const {
  const GradientSums& sums = unit_.sums();
  const auto sources = static_cast<int64_t>(sources_.size());
  const auto same = [&](int64_t i, int64_t j) {
    if (sums.fresh(i) != sums.fresh(j)) return false;
    for (int64_t source = 0; source < sources; ++source) {
      if (may_be_used_by(source, i) != may_be_used_by(source, j)) return false;
    }
    return true;
  };
  return unit_.layout().runs([this](int64_t i) { return is_used(i); }, same);
}

void UnitReduction::await_copies() const {
  if (sent_to_host_.has_value()) wait_on_host(*sent_to_host_, comm_.watch().get());
}

void UnitReduction::add_window(const std::vector<Run>& runs, float scale) {
  for (Run run : runs) {
    const int64_t end = std::min(run.begin + run.numel, window_.end());
    run.begin = std::max(run.begin, window_.begin);
    run.numel = end - run.begin;
    if (run.numel > 0) add_run(run, scale);
  }
}

void UnitReduction::add_run(const Run& run, float scale) {
  std::vector<const void*> contributions;
  for (size_t source = 0; source < sources_.size(); ++source) {
    if (!may_be_used_by(static_cast<int64_t>(source), run.first_slot)) continue;
    contributions.push_back(element(sources_[source], run.begin - window_.begin));
  }
  GradientSums& sums = unit_.sums();
  float* sum = sums.data() + run.begin;
  int32_t nonfinite = 0;
  const KernelTable& table = context_.state;
  int32_t* flag =
      table.on_host() ? &nonfinite : context_.nan_records->sum_flag(unit_.record(run.first_slot));
  check(table->accumulate_ranks(contributions.data(), static_cast<int32_t>(contributions.size()),
                                dtype_of(message_.scalar_type()), sum, run.numel, scale,
                                sums.fresh(run.first_slot), flag, table.launch()),
        "accumulate_ranks");
  if (nonfinite == 0) return;
  for (int64_t i = run.first_slot; i <= run.last_slot; ++i) {
    if (unit_.layout().own_piece(i) == nullptr) continue;
    context_.nan_records->suspect_sum(unit_.record(i));
  }
}

AbandonedReduction UnitReduction::abandon() {
  const SideStream::Scope beside(context_.reducing);
  leave_slot();
  bucket_->mark_used();
  pending_.append(std::move(pending_flags_));
  return {std::move(pending_), std::move(bucket_), std::move(flags_), std::move(sent_to_host_)};
}

}  // namespace zero_ext
