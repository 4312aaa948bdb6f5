#include "units/host_copies.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "units/changed_part.h"

namespace zero_ext {
namespace {

// Of messages between hosts, whose tags have 30 bits. Parts have the unit's tag.
constexpr int64_t kStateTag = int64_t{1} << 28;
constexpr int64_t kUpdateTag = int64_t{1} << 29;
constexpr int64_t kUpdateTags = int64_t{1} << 28;

// Of messages within a host.
int64_t tag_of_copy(int64_t gather_tag, int64_t range) { return gather_tag + ((range + 1) << 32); }

}  // namespace

HostCopies::HostCopies(const UnitContext& context, const RankLayout& layout, at::ScalarType dtype,
                       int64_t gather_tag, bool packs, const Comm& comm)
    : context_(context),
      layout_(layout),
      gather_tag_(gather_tag),
      packs_(packs),
      equal_(at::zeros({1}, at::kBool)) {
  for (int64_t range = 0; range < layout.ranges(); ++range) {
    if (!comm.brings_to_host(range)) continue;
    kept_.emplace(range, FlatBuffer(context.memory, Held::shard, context.compute_place(), dtype,
                                    layout.range_numel()));
  }
}

void HostCopies::fill(const std::function<void(void*, int64_t)>& fill) {
  for (auto& [range, copy] : kept_) fill(copy.data(), range);
  show(true);
}

void HostCopies::begin_update() {
  equal_before_ = *equal_.const_data_ptr<bool>();
  sent_ = false;
  show(false);
}

int64_t HostCopies::send(Comm& comm, int64_t number, const at::Tensor& part, const uint16_t* marks,
                         Pending& pending) {
  sent_ = true;
  const auto copy_of = [this](int64_t range) { return kept_.at(range).tensor(); };
  return comm.send_to_hosts(
      part, copy_of, kUpdateTag + number % kUpdateTags, pending,
      packs_ ? packed_changes(part, equal_before_ ? marks : nullptr) : PackedRange());
}

void HostCopies::end_update(bool lent) { show(sent_ ? !lent : equal_before_); }

bool HostCopies::are_equal(Comm& comm, const std::function<std::string()>& what) const {
  const at::Tensor equal = at::ones({layout_.ranges()}, at::kBool);
  Pending pending;
  for (int64_t range = 0; range < layout_.ranges(); ++range) {
    if (comm.shares_host(range)) continue;
    comm.receive(equal.narrow(0, range, 1), context_.first_of_replica() + range,
                 kStateTag + gather_tag_, pending);
  }
  pending.wait(what);
  return equal.all().item<bool>();
}

void HostCopies::receive(Comm& comm, const FlatBuffer& full, Pending& pending,
                         const std::function<std::string()>& what) {
  reads_owners_ = !are_equal(comm, what);
  const int64_t ranges = layout_.ranges();
  for (int64_t step = 1; step < ranges; ++step) {
    const int64_t range = (layout_.own_range() + ranges - step) % ranges;
    const at::Tensor into = full.slice(layout_.range_begin(range), layout_.range_numel());
    const auto kept = kept_.find(range);
    if (comm.shares_host(range) || reads_owners_) {
      comm.receive(into, context_.first_of_replica() + range, gather_tag_, pending);
    } else if (kept != kept_.end()) {
      copy_bytes(into.mutable_data_ptr(), full.device(), kept->second.data(), full.device(),
                 into.nbytes());
    } else {
      comm.receive(into, context_.first_of_replica() + comm.bringer(range),
                   tag_of_copy(gather_tag_, range), pending);
    }
  }
}

PostedSend HostCopies::post_state(Comm& comm, int64_t peer) const {
  return comm.post_send(equal_, peer, kStateTag + gather_tag_);
}

std::vector<PostedSend> HostCopies::post_copies(Comm& comm) const {
  std::vector<PostedSend> posted;
  for (int64_t peer = 0; peer < comm.world(); ++peer) {
    if (!comm.reads(peer) || !context_.shares_replica_with(peer)) continue;
    for (const auto& [range, copy] : kept_) {
      posted.push_back(
          comm.post_persistent_send(copy.tensor(), peer, tag_of_copy(gather_tag_, range)));
    }
  }
  return posted;
}

}  // namespace zero_ext
