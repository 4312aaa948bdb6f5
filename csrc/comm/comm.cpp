#include "comm/comm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "comm/local/shared_host_transport.h"
#include "core/errors.h"

namespace zero_ext {
namespace {

constexpr int64_t kShutdownTag = 0x3fffffff;
constexpr int64_t kPartsTag = 0x3ffffffe;
// Above all tags of gathers: what a rank sends on to its host.
constexpr int64_t kSentOn = int64_t{1} << 44;

// "" where there is none. `rank`: as error messages call the one that did not come.
std::string text_of_failure(const PeerMemory::Failure& failure, int64_t rank,
                            std::chrono::milliseconds timeout) {
  if (failure.rank < 0) return "";
  if (failure.other_dtype)
    return "rank " + std::to_string(rank) +
           " has reduced gradients of another dtype than this rank. Every rank must run the same"
           " backwards inside and outside no_sync().";
  return "the device has waited " + std::to_string(timeout.count() / 1000) + " s for rank " +
         std::to_string(rank) + ", and this step's values are lost." +
         SharedHostTransport::dead_peers() +
         " Look for the first error in that rank's log. Start all ranks again from a checkpoint.";
}

}  // namespace

Comm::Comm(std::vector<int64_t> global_ranks)
    : Agreements(std::make_shared<ProcessGroups>(), std::move(global_ranks)) {}

Comm::Comm(const Names& groups, c10::Device device, std::vector<int64_t> global_ranks)
    : Agreements(std::make_shared<ProcessGroups>(groups, device), std::move(global_ranks)) {}

void Comm::connect_local_peers(std::chrono::milliseconds timeout, int64_t host) {
  if (world() == 1) return;
  connect_local(timeout, host, [this](const at::Tensor& values) {
    return all_gather(Agreement::local_peers, values, [this] {
      return where(global_rank()) +
             "waited for the other ranks to answer whether they share its host";
    });
  });
}

bool Comm::all_can(bool this_one) {
  const auto what = [this] {
    return where(global_rank()) +
           "waited for the other ranks to answer whether their devices read its memory";
  };
  const at::Tensor own = at::full({1}, this_one ? 1 : 0, at::kLong);
  return all_gather(Agreement::local_peers, own, what).ne(0).all().item<bool>();
}

void Comm::connect_devices(std::chrono::milliseconds timeout, Direct direct) {
  why_sent_ = "they travel through host memory";
  if (world() == 1 || !way().queued) return;
  why_sent_ = "the ranks are on several hosts";
  if (!way().one_host) return;
  const c10::Device device = groups().device();
  why_sent_ = "torch has no memory that devices share here";
  if (!all_can(PeerMemory::is_known_on(device) && world() <= kernels::kMostWords)) return;
  try {
    peer_memory_ = std::make_shared<PeerMemory>(
        PeerMemory::Ranks{.rank = rank(), .world = world(), .device = device}, groups().store(),
        timeout);
  } catch (const std::exception& error) {
    why_sent_ = text_of(error);
    peer_memory_.reset();
  }
  if (!all_can(peer_memory_ != nullptr)) return peer_memory_.reset();
  why_sent_.clear();
  read_in_place(direct);
  std::vector<int64_t> names;
  for (int64_t peer = 0; peer < world(); ++peer) names.push_back(global_rank(peer));
  watch()->ask_about_failures([memory = peer_memory_, names = std::move(names), timeout] {
    const PeerMemory::Failure failure = memory->failure();
    return text_of_failure(failure, failure.rank < 0 ? -1 : names[failure.rank], timeout);
  });
}

void Comm::connect_backend(Kinds kinds) {
  if (world() == 1 || !way().queued) return;
  const at::Tensor parts = at::zeros({world()}, at::TensorOptions().device(groups().device()));
  const std::vector<at::Tensor> sends = parts.split(1);
  Pending pending;
  all_reduce_sum(parts, pending);
  if (kinds.exchanges) exchange(sends, at::zeros_like(parts).split(1), 0, 0, pending);
  if (kinds.reduce_scatters)
    reduce_scatter(parts.narrow(0, 0, shards()), sends[0].clone(), pending);
  if (kinds.gathers) gather(parts.narrow(0, 0, shards()), 0, pending);
  pending.wait([this] {
    return where(global_rank()) + "waited for the other ranks to connect their devices";
  });
}

int64_t Comm::show_filled(const at::Tensor& message, Pending& pending) {
  check_process();
  PeerMemory::Filled filled = peer_memory_->show_filled(message.scalar_type());
  add(pending, {.message = std::move(filled.message), .tensor = message});
  return filled.slot;
}

void Comm::finish(std::chrono::milliseconds patience) const noexcept {
  groups().finish(patience);
  if (peer_memory_ != nullptr) peer_memory_->stop();
}

void Comm::exchange(const std::vector<at::Tensor>& sends, const std::vector<at::Tensor>& recvs,
                    int64_t epoch, int64_t tag, Pending& pending) {
  if (world() == 1) return;
  if (way().queued) {
    std::vector<at::Tensor> inputs = sends;
    std::vector<at::Tensor> outputs = recvs;
    const at::Tensor nothing = at::empty({0}, sends[rank() == 0 ? world() - 1 : 0].options());
    inputs[rank()] = nothing;
    outputs[rank()] = nothing;
    Message message = groups().all_to_all(outputs, inputs);
    // One wait for all, and no tensor given up before it.
    for (int64_t peer = 0; peer < world(); ++peer) {
      add(pending, {.message = nullptr, .tensor = inputs[peer], .peer = peer, .sending = true});
      add(pending, {.message = nullptr, .tensor = outputs[peer], .peer = peer});
    }
    add(pending, {.message = std::move(message), .tensor = nothing});
    return;
  }
  const MessageLabel label{MessageKind::reduction, tag, epoch};
  for (int64_t step = 1; step < world(); ++step) {
    const int64_t from = (rank() + world() - step) % world();
    Peers::receive(recvs[from], from, label, pending);
  }
  for (int64_t step = 1; step < world(); ++step) {
    const int64_t to = (rank() + step) % world();
    send(sends[to], to, label, pending);
  }
}

void Comm::reduce_scatter(const at::Tensor& input, const at::Tensor& output, Pending& pending) {
  check_process();
  const at::Tensor in = outgoing(input);
  const at::Tensor out = incoming(output);
  Message message = groups().reduce_scatter_in_replica(out, in);
  add(pending, {.message = nullptr, .tensor = in});
  std::shared_ptr<const ProcessGroups> across;
  if (groups().has_replicas()) {
    if (way().queued) {  // queued after the reduce-scatter; the host waits for neither
      message->wait();
      message = groups().sum_over_replicas(out);
    } else {
      across = shared_groups();
    }
  }
  add(pending, {.message = std::move(message),
                .tensor = out,
                .target = target_of(output),
                .across = std::move(across)});
}

void Comm::all_reduce_sum(const at::Tensor& tensor, Pending& pending) {
  if (world() == 1) return;
  check_process();
  const at::Tensor here = outgoing(tensor);
  add(pending, {.message = groups().sum(here), .tensor = here, .target = target_of(tensor)});
}

int64_t Comm::gather(const at::Tensor& full, int64_t tag, Pending& pending,
                     const PackedRange& packed) {
  const int64_t ranges = shards();
  const int64_t numel = full.numel() / ranges;
  const auto range = [&](int64_t rank) { return full.narrow(0, rank % ranges * numel, numel); };
  if (way().queued) {
    add(pending, {.message = groups().all_gather_in_replica(full, range(rank())), .tensor = full});
    return 0;
  }
  // Point to point: gloo's own all-gather is a ring that takes three times as long for two ranks.
  const HostRoutes& routes = this->routes();
  const int64_t own = rank() % ranges;
  const int64_t first = rank() - own;
  for (int64_t step = 1; step < ranges; ++step) {
    const int64_t from = (own + ranges - step) % ranges;
    if (brings_to_host(from)) {
      receive_from_host(range(from), from, tag, pending, packed, /*sends_on=*/true);
      continue;
    }
    const int64_t source = routes.source(from, own);
    const int64_t tag_here = source == from ? tag : tag + (from + 1) * kSentOn;
    Peers::receive(range(from), first + source, {MessageKind::gather, tag_here}, pending);
  }
  const at::Tensor part = outgoing(range(own));
  const int64_t bytes = send_to_other_hosts(packed.own.defined() ? packed.own : part, tag, pending);
  for (int64_t step = 1; step < ranges; ++step) {
    const int64_t to = (own + step) % ranges;
    if (shares_host(to)) send(part, first + to, {MessageKind::gather, tag}, pending);
  }
  return bytes;
}

int64_t Comm::send_to_other_hosts(const at::Tensor& message, int64_t tag, Pending& pending) {
  const int64_t own = rank() % shards();
  int64_t bytes = 0;
  for (int64_t step = 1; step < shards(); ++step) {
    const int64_t to = (own + step) % shards();
    if (shares_host(to) || routes().source(own, to) != own) continue;
    send(message, rank() - own + to, {MessageKind::gather, tag}, pending);
    bytes += static_cast<int64_t>(message.nbytes());
  }
  return bytes;
}

int64_t Comm::send_to_hosts(const at::Tensor& part,
                            const std::function<at::Tensor(int64_t)>& copy_of, int64_t tag,
                            Pending& pending, const PackedRange& packed) {
  for (int64_t from = 0; from < shards(); ++from) {
    if (brings_to_host(from))
      receive_from_host(copy_of(from), from, tag, pending, packed, /*sends_on=*/false);
  }
  return send_to_other_hosts(packed.own.defined() ? packed.own : part, tag, pending);
}

int64_t Comm::bringer(int64_t range) const {
  const int64_t own = rank() % shards();
  const int64_t source = routes().source(range, own);
  return source == range ? own : source;
}

void Comm::receive_from_host(const at::Tensor& part, int64_t range, int64_t tag, Pending& pending,
                             const PackedRange& packed, bool sends_on) {
  const bool unpacks = packed.own.defined();
  const at::Tensor message = unpacks ? at::empty({packed.most_bytes}, at::kByte) : part;
  const int64_t tag_here = tag + (range + 1) * kSentOn;
  Pending::Relay relay = [this, part, tag_here, sends_on, unpack = packed.unpack](
                             const at::Tensor& arrived, Pending& sends) {
    if (unpack != nullptr) unpack(arrived, part);
    if (sends_on) send_on(unpack != nullptr ? part : arrived, tag_here, sends);
  };
  const int64_t owner = rank() - rank() % shards() + range;
  Peers::receive(message, owner, {MessageKind::gather, tag}, pending, std::move(relay));
}

void Comm::send_on(const at::Tensor& part, int64_t tag, Pending& pending) {
  const int64_t own = rank() % shards();
  for (int64_t to = 0; to < shards(); ++to) {
    if (to != own && routes().share_host(own, to))
      send(part, rank() - own + to, {MessageKind::gather, tag}, pending);
  }
}

void Comm::gather_parts(const at::Tensor& flat, const std::vector<int64_t>& bounds,
                        const std::vector<bool>& wanting, Pending& pending) {
  check_process();
  const int64_t ranges = std::ssize(bounds) - 1;
  const int64_t own = rank() % ranges;
  const int64_t first = rank() - own;
  const auto part = [&](int64_t r) { return flat.narrow(0, bounds[r], bounds[r + 1] - bounds[r]); };
  if (way().queued) {
    for (int64_t r = 0; r < ranges; ++r) {
      const at::Tensor theirs = part(r);
      if (theirs.numel() == 0) continue;
      add(pending, {.message = groups().broadcast_in_replica(theirs, r), .tensor = theirs});
    }
    return;
  }
  const MessageLabel label{MessageKind::gather, kPartsTag};
  for (int64_t step = 1; step < ranges && wanting[rank()]; ++step) {
    const int64_t from = (own + ranges - step) % ranges;
    if (bounds[from] < bounds[from + 1]) Peers::receive(part(from), first + from, label, pending);
  }
  if (bounds[own] == bounds[own + 1]) return;
  for (int64_t step = 1; step < ranges; ++step) {
    const int64_t to = first + (own + step) % ranges;
    if (wanting[to]) send(part(own), to, label, pending);
  }
}

void Comm::broadcast(const at::Tensor& tensor, const std::function<std::string()>& what) {
  if (world() == 1) return;
  check_process();
  Pending pending;
  if (is_subset()) {
    const MessageLabel label{MessageKind::gather, kPartsTag};
    if (rank() > 0) Peers::receive(tensor, 0, label, pending);
    for (int64_t to = 1; to < world() && rank() == 0; ++to) send(tensor, to, label, pending);
  } else {
    const at::Tensor here = outgoing(tensor);
    add(pending,
        {.message = groups().broadcast(here), .tensor = here, .target = target_of(tensor)});
  }
  pending.wait(what);
}

void Comm::receive(const at::Tensor& into, int64_t from, int64_t tag, Pending& pending) {
  if (way().gathers == Gathers::pulled) return receive_part(into, from, tag, 0, pending);
  Peers::receive(into, from, {MessageKind::gather, tag}, pending);
}

void Comm::receive_part(const at::Tensor& into, int64_t from, int64_t tag, int64_t offset,
                        Pending& pending) {
  if (way().gathers == Gathers::pulled) {
    check_process();
    return peer_memory_->read_kept(into, from, tag, offset);
  }
  Peers::receive_part(into, from, {MessageKind::gather, tag}, offset, pending);
}

PostedSend Comm::post_send(const at::Tensor& tensor, int64_t to, int64_t tag) {
  return std::make_shared<const Message>(start_send(tensor, to, {MessageKind::gather, tag}));
}

PostedSend Comm::post_persistent_send(const at::Tensor& tensor, int64_t to, int64_t tag) {
  return std::make_shared<const Message>(post_persistent(tensor, to, {MessageKind::gather, tag}));
}

void Comm::begin_shutdown(Pending& pending) {
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  for (int64_t peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    Peers::receive(at::empty({1}, bytes), peer, {MessageKind::gather, kShutdownTag}, pending);
    send(at::zeros({1}, bytes), peer, {MessageKind::gather, kShutdownTag}, pending);
  }
  leave_local();
}

}  // namespace zero_ext
