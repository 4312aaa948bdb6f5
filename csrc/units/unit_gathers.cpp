// Gathers of a unit's parameters: the part of UnitParameters that talks to other ranks.
#include <utility>

#include "core/errors.h"
#include "units/changed_part.h"
#include "units/unit_parameters.h"

namespace zero_ext {

int64_t UnitParameters::gather(Comm& comm, int64_t tag, Pending& pending, const uint16_t* marks) {
  if (layout_.ranges() == 1) return 0;
  PackedRange packed;
  if (marks != nullptr)
    packed = packed_changes(
        full_.slice(layout_.range_begin(layout_.own_range()), layout_.range_numel()), marks);
  return comm.gather(full_.tensor(), tag, pending, packed);
}

PostedSend UnitParameters::post_send(Comm& comm, int64_t peer) const {
  const at::Tensor& part = mirror_.defined() ? mirror_ : shard_.tensor();
  return comm.reads(peer) ? comm.post_persistent_send(part, peer, gather_tag_)
                          : comm.post_send(part, peer, gather_tag_);
}

void UnitParameters::go_beside(std::optional<SideStream::Scope>& beside) const {
  if (!on_host_) return;
  // The host updates the shard, and would not know that a replay still copies it.
  TORCH_CHECK(capture_id(current_stream(context_.compute.device())) == 0,
              where(context_.global_rank, name_),
              "parameters that lie in host memory were used while a graph is captured. Capture a"
              " model that is sharded without offload_policy.");
  beside.emplace(context_.gathering);
}

void UnitParameters::start_gather(Comm& comm, int64_t number,
                                  const std::function<std::string()>& what) {
  const bool released = full_.emptied();
  if (!released) written_.accept_all();
  if (released) {
    drop_idle_shard();
    std::optional<SideStream::Scope> beside;
    go_beside(beside);
    arriving_ = full_.incoming(*context_.spare);
  }
  try {
    if (shard_.defined() && shard_.lent()) remember_lent_shard();
    receive_ranges(comm, number, what);
  } catch (...) {
    gathering_ = Pending();
    context_.gathering.join();  // which may be writing to it
    if (released) {
      lent_before_.drop();
      arriving_.empty(*context_.spare, released_message_);
      arriving_.drop();
    }
    throw;
  }
}

void UnitParameters::finish_gather(const std::function<std::string()>& what) {
  // Not for all that was queued beside: later gathers and earlier releases may be under way.
  if (own_range_.has_value()) own_range_->block(current_stream(context_.compute.device()));
  gathering_.wait(what);
  if (arriving_.defined()) full_.take_memory_of(arriving_);
  arriving_.drop();
  written_.take_sums();
}

void UnitParameters::settle_gather() {
  if (!arriving_.defined()) return;
  finish_gather([this] { return where(context_.global_rank, name_) + "waited for its gather"; });
}

void UnitParameters::receive_ranges(Comm& comm, int64_t number,
                                    const std::function<std::string()>& what) {
  const SideStream::Scope beside(context_.gathering);
  const int64_t part = layout_.range_numel();
  if (comm.way().gathers == Gathers::collective) {
    bring_own_range();
    comm.show_gather(number);
    if (layout_.ranges() > 1) comm.gather(gathered().tensor(), gather_tag_, gathering_);
    return;
  }
  const int64_t ranges = layout_.ranges();
  if (copies_ != nullptr) copies_->receive(comm, gathered(), gathering_, what);
  for (int64_t step = 1; step < ranges && copies_ == nullptr; ++step) {
    const int64_t range = (layout_.own_range() + ranges - step) % ranges;
    comm.receive(gathered().slice(layout_.range_begin(range), part),
                 context_.first_of_replica() + range, gather_tag_, gathering_);
  }
  bring_own_range();
}

void UnitParameters::read_slot(Comm& comm, int64_t i, const at::Tensor& flat, Pending& pending) {
  if (!full_.emptied()) {
    const Slot& slot = layout_.slot(i);
    flat.copy_(full_.slice(slot.offset, slot.spec.numel));
    return;
  }
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype_));
  for (const Piece& piece : layout_.pieces(i)) {
    const at::Tensor part = flat.narrow(0, piece.slot_begin, piece.numel);
    if (piece.range == layout_.own_range()) {
      part.copy_(present_slice(i));
    } else if (piece.numel > 0) {
      comm.receive_part(part, context_.first_of_replica() + piece.range, gather_tag_,
                        piece.range_begin * itemsize, pending);
    }
  }
}

void UnitParameters::serve_gather(Comm& comm, int64_t number, const StreamEvent& since,
                                  const std::function<std::string()>& what) {
  const SideStream::Scope beside(context_.gathering, since);
  const at::Tensor full = context_.on_device(layout_.padded_numel(), dtype_);
  copy_own_range(mutable_element(full, layout_.own_begin()));
  Pending gathering;
  comm.show_gather(number);
  comm.gather(full, gather_tag_, gathering);
  gathering.wait(what);
}

void UnitParameters::bring_own_range() {
  copy_own_range(gathered().at(layout_.own_begin()));
  const c10::Device device = context_.compute.device();
  if (!device.is_cpu()) own_range_.emplace(current_stream(device));
}

void UnitParameters::copy_own_range(void* into) const {
  if (shard_.defined()) {
    copy_bytes(into, full_.device(), shard_.data(), shard_.device(), shard_.tensor().nbytes());
  } else {
    cast_master(into);
  }
}

}  // namespace zero_ext
