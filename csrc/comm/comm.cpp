#include "comm/comm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "core/errors.h"
#include "core/torch_internals.h"
#include "device/streams.h"

namespace zero_ext {
namespace {

// torch 2.13 renamed the single-tensor collectives and deprecates the old names.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
auto reduce_scatter_into(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  return group.reduce_scatter_single(output, input);
}
auto all_gather_into(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  return group.all_gather_single(output, input);
}
#else
auto reduce_scatter_into(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  return group._reduce_scatter_base(output, input);
}
auto all_gather_into(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  return group._allgather_base(output, input);
}
#endif

c10::intrusive_ptr<c10d::Work> sum_over(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return group.allreduce(tensors);
}

// gloo's tags are 32-bit; numbers that all ranks count alike stay alike when they wrap.
constexpr int64_t kShutdownTag = 0x3fffffff;

int tag_of(int64_t tag) { return static_cast<int>(tag & 0x3fffffff); }

}  // namespace

struct Pending::Part {
  c10::intrusive_ptr<c10d::Work> work;  // null: another part's, which is waited for first
  at::Tensor tensor;
  int64_t peer = kAll;  // the rank waited for, as messages call it
  bool sending = false;
  at::Tensor target = {};  // where defined: `tensor` goes there when it has come
  // Where set: when it has come it is summed over this group, too.
  c10::intrusive_ptr<c10d::ProcessGroup> across = {};
};

Pending::Pending() = default;
Pending::~Pending() = default;
Pending::Pending(Pending&& other) noexcept = default;
Pending& Pending::operator=(Pending&& other) noexcept = default;

PostedSend::PostedSend(c10::intrusive_ptr<c10d::Work> message) : message_(std::move(message)) {}
PostedSend::~PostedSend() = default;
PostedSend::PostedSend(PostedSend&& other) noexcept = default;
PostedSend& PostedSend::operator=(PostedSend&& other) noexcept = default;

void Pending::wait(const std::function<std::string()>& what) {
  // First for what comes: who waits for it hears of errors. Even after an error the other parts are
  // waited for by nobody: their tensors live until this object dies.
  std::stable_partition(parts_.begin(), parts_.end(),
                        [](const Part& part) { return part.sending; });
  while (!parts_.empty()) {
    Part& part = parts_.back();
    try {
      if (part.work != nullptr) part.work->wait();
      if (part.across != nullptr) sum_over(*part.across, part.tensor)->wait();
      if (part.target.defined()) part.target.copy_(part.tensor);
    } catch (const std::exception& error) {
      const std::string peer =
          part.peer == kAll ? "the other ranks" : "rank " + std::to_string(part.peer);
      const std::string cause = text_of(error);
      const bool timed_out = cause.find("imed out") != std::string::npos;
      TORCH_CHECK(
          false, what(), part.sending ? " (sending to " : " (waiting for ", peer, "): ", cause,
          "\nEvery rank must run the same backwards and steps; look for the first error in "
          "the logs of the other ranks.",
          timed_out ? " The timeout is that of the process group, or ZERO_EXT_TIMEOUT_S." : "");
    }
    parts_.pop_back();
  }
  if (watch_ != nullptr) std::exchange(watch_, nullptr)->add(what());
}

void Pending::abandon() noexcept {
  for (Part& part : parts_) {
    if (part.work != nullptr) SharedHostTransport::withdraw(*part.work);
    part.work.reset();  // before the memory that it may still point to
  }
  parts_.clear();
}

void Pending::wait_if_possible() noexcept {
  for (const Part& part : parts_) {
    try {
      if (part.work != nullptr) part.work->wait();
    } catch (const std::exception&) {
      // This peer has gone without a word; others may still be there.
    }
  }
  parts_.clear();
}

Comm::Comm(std::vector<int64_t> global_ranks) : global_ranks_(std::move(global_ranks)) {}
Comm::~Comm() = default;
Comm::Comm(const Comm& other) = default;

Comm::Comm(const Names& groups, c10::Device device, std::vector<int64_t> global_ranks)
    : device_(device),
      reduce_group_(c10d::resolve_process_group(groups.reduce)),
      gather_group_(c10d::resolve_process_group(groups.gather)),
      within_reduce_(reduce_group_),
      within_gather_(gather_group_),
      rank_(reduce_group_->getRank()),
      world_(reduce_group_->getSize()),
      global_ranks_(std::move(global_ranks)) {
  if (!groups.across.empty()) {
    within_reduce_ = c10d::resolve_process_group(groups.within_reduce);
    within_gather_ = c10d::resolve_process_group(groups.within_gather);
    across_ = c10d::resolve_process_group(groups.across);
  }
  shards_ = within_reduce_->getSize();
  if (device.is_cpu()) return;
  const std::vector<c10::Device> devices = reduce_group_->getDeviceTypes();
  const bool has_backend = std::any_of(devices.begin(), devices.end(), [&](c10::Device other) {
    // gloo says that it takes a device's tensors, but most of its collectives do not.
    return other.type() == device.type() &&
           reduce_group_->getBackend(other.type())->getBackendName() != "gloo";
  });
  way_ = has_backend ? Way::device : Way::staged;
}

const char* Comm::name_of(Agreement about) {
  switch (about) {
    case Agreement::local_peers:
      return "shard()";
    case Agreement::late_gradients:
      return "a backward";
    case Agreement::step:
    case Agreement::reduction_order:
      return "step()";
    case Agreement::clip:
      return "clip_grad_norm_()";
    case Agreement::shards:
      return "the end of a step, or of a write to parameters";
  }
  return "another version of zero_ext";
}

void Comm::check_process() const {
  TORCH_CHECK(world_ == 1 || !is_forked(), where(global_rank()),
              "a forked child cannot exchange messages in its parent's place. Have a DataLoader's"
              " workers do without this model, or give them a plain copy of it with its full"
              " parameters.");
}

void Comm::connect_local_peers(std::chrono::milliseconds timeout, bool allowed) {
  if (world_ == 1 || on_device()) return;
  local_transport_ =
      SharedHostTransport::connect(rank_, world_, timeout, allowed, [this](const at::Tensor& mine) {
        return all_gather(Agreement::local_peers, mine, [this] {
          return where(global_rank()) +
                 "waited for the other ranks to say whether they share its host";
        });
      });
}

void Comm::watch_collectives(std::chrono::milliseconds timeout) {
  if (world_ == 1 || !on_device()) return;
  watch_ = std::make_shared<CollectiveWatch>(device_, timeout);
}

int64_t Comm::local_peers() const {
  int64_t count = 0;
  for (int64_t peer = 0; peer < world_; ++peer) {
    if (reads(peer)) ++count;
  }
  return count;
}

int64_t Comm::next_epoch(Kind kind, int64_t last) const {
  return local_transport_ == nullptr || is_forked() ? last + 1
                                                    : local_transport_->next_epoch(kind, last);
}

void Comm::leave_epoch(Kind kind, int64_t epoch, Exit exit) const noexcept {
  if (local_transport_ != nullptr && !is_forked()) local_transport_->leave_epoch(kind, epoch, exit);
}

int64_t Comm::who_abandoned(Kind kind, int64_t epoch) const {
  return local_transport_ == nullptr || is_forked() ? -1
                                                    : local_transport_->who_abandoned(kind, epoch);
}

Comm::Work Comm::send(const at::Tensor& tensor, int64_t to, const Label& label) {
  check_process();
  if (reads(to)) return local_transport_->send(tensor, to, label);
  std::vector<at::Tensor> tensors{tensor};
  return group_of(label.kind)->send(tensors, static_cast<int>(to), tag_of(label.tag));
}

Comm::Work Comm::recv(const at::Tensor& into, int64_t from, const Label& label) {
  check_process();
  if (reads(from)) return local_transport_->receive(into, from, label);
  std::vector<at::Tensor> tensors{into};
  return group_of(label.kind)->recv(tensors, static_cast<int>(from), tag_of(label.tag));
}

at::Tensor Comm::outgoing(const at::Tensor& tensor) const {
  return by_host(tensor) ? tensor.cpu() : tensor;
}

at::Tensor Comm::incoming(const at::Tensor& tensor) const {
  return by_host(tensor) ? at::empty_like(tensor, at::kCPU) : tensor;
}

at::Tensor Comm::target_of(const at::Tensor& tensor) const {
  return by_host(tensor) ? tensor : at::Tensor();
}

void Comm::add(Pending& pending, Pending::Part part) const {
  if (part.peer != Pending::kAll) part.peer = global_rank(part.peer);
  pending.parts_.push_back(std::move(part));
  pending.watch_ = watch_;
}

void Comm::exchange(const std::vector<at::Tensor>& sends, const std::vector<at::Tensor>& recvs,
                    int64_t epoch, int64_t tag, Pending& pending) {
  if (world_ == 1) return;
  if (on_device()) {
    std::vector<at::Tensor> inputs = sends;
    std::vector<at::Tensor> outputs = recvs;
    const at::Tensor nothing = at::empty({0}, sends[rank_ == 0 ? world_ - 1 : 0].options());
    inputs[rank_] = nothing;
    outputs[rank_] = nothing;
    const auto work = reduce_group_->alltoall(outputs, inputs);
    // One wait for all, and no tensor given up before it.
    for (int64_t peer = 0; peer < world_; ++peer) {
      add(pending, {nullptr, inputs[peer], peer, /*sending=*/true, {}});
      add(pending, {nullptr, outputs[peer], peer, /*sending=*/false, {}});
    }
    add(pending, {work, nothing});
    return;
  }
  const Label label{Kind::reduction, tag, epoch};
  for (int64_t step = 1; step < world_; ++step) {
    const int64_t from = (rank_ + world_ - step) % world_;
    const at::Tensor into = incoming(recvs[from]);
    add(pending, {recv(into, from, label), into, from, /*sending=*/false, target_of(recvs[from])});
  }
  for (int64_t step = 1; step < world_; ++step) {
    const int64_t to = (rank_ + step) % world_;
    const at::Tensor out = outgoing(sends[to]);
    add(pending, {send(out, to, label), out, to, /*sending=*/true, {}});
  }
}

void Comm::reduce_scatter(const at::Tensor& input, const at::Tensor& output, Pending& pending) {
  check_process();
  at::Tensor in = outgoing(input);
  at::Tensor out = incoming(output);
  auto work = reduce_scatter_into(*within_reduce_, out, in);
  add(pending, {nullptr, in});
  Group across = across_;
  if (across != nullptr && on_device()) {  // queued behind it; the host waits for neither
    work->wait();
    work = sum_over(*across, out);
    across.reset();
  }
  add(pending, {work, out, Pending::kAll, false, target_of(output), across});
}

void Comm::all_reduce_sum(const at::Tensor& tensor, Pending& pending) {
  if (world_ == 1) return;
  check_process();
  const at::Tensor here = outgoing(tensor);
  add(pending, {sum_over(*reduce_group_, here), here, Pending::kAll, false, target_of(tensor)});
}

void Comm::gather(const at::Tensor& full, int64_t tag, Pending& pending) {
  const int64_t numel = full.numel() / shards_;
  const auto range = [&](int64_t rank) { return full.narrow(0, rank % shards_ * numel, numel); };
  if (on_device()) {
    at::Tensor output = full;
    at::Tensor input = range(rank_);
    add(pending, {all_gather_into(*within_gather_, output, input), full});
    return;
  }
  // Point to point: gloo's own all-gather is a ring that takes three times as long for two ranks.
  const Label label{Kind::gather, tag};
  const int64_t first = rank_ - rank_ % shards_;
  for (int64_t step = 1; step < shards_; ++step) {
    const int64_t from = first + (rank_ + shards_ - step) % shards_;
    receive(range(from), from, label, pending);
  }
  const at::Tensor own = outgoing(range(rank_));
  for (int64_t step = 1; step < shards_; ++step) {
    const int64_t to = first + (rank_ + step) % shards_;
    add(pending, {send(own, to, label), own, to, /*sending=*/true, {}});
  }
}

PostedSend Comm::post_send(const at::Tensor& tensor, int64_t to, int64_t tag) {
  return PostedSend(send(tensor, to, {Kind::gather, tag}));
}

PostedSend Comm::post_persistent_send(const at::Tensor& tensor, int64_t to, int64_t tag) {
  check_process();
  return PostedSend(local_transport_->post(tensor, to, {Kind::gather, tag}));
}

void Comm::receive(const at::Tensor& into, int64_t from, const Label& label, Pending& pending) {
  const at::Tensor here = incoming(into);
  add(pending, {recv(here, from, label), here, from, /*sending=*/false, target_of(into)});
}

void Comm::begin_shutdown(Pending& pending) {
  for (int64_t peer = 0; peer < world_; ++peer) {
    if (peer == rank_) continue;
    const at::Tensor theirs = at::empty({1}, at::TensorOptions().dtype(at::kByte));
    const at::Tensor mine = at::zeros({1}, at::TensorOptions().dtype(at::kByte));
    receive(theirs, peer, kShutdownTag, pending);
    add(pending,
        {send(mine, peer, {Kind::gather, kShutdownTag}), mine, peer, /*sending=*/true, {}});
  }
  if (local_transport_ != nullptr) local_transport_->leave();
}

void Comm::finish(std::chrono::milliseconds patience) noexcept {
  if (world_ == 1 || !on_device()) return;
  try {
    c10::Event ended(device_.type());
    ended.record(current_stream(device_));
    const auto deadline = std::chrono::steady_clock::now() + patience;
    // Not synchronize(): a rank that is gone will never take part.
    while (!ended.query() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (const Group& group : {reduce_group_, gather_group_}) group->abort();
    if (across_ == nullptr) return;
    for (const Group& group : {within_reduce_, within_gather_, across_}) group->abort();
  } catch (const std::exception&) {
    // The device is in an error, or its backend has been aborted.
  }
}

at::Tensor Comm::all_gather(Agreement about, const at::Tensor& values,
                            const std::function<std::string()>& what) {
  if (world_ == 1) return values.unsqueeze(0);
  if (on_device()) return all_gather(values, what);
  const int64_t numel = values.numel();
  const at::Tensor told = at::empty({1 + numel}, at::TensorOptions().dtype(at::kLong));
  *told.mutable_data_ptr<int64_t>() = static_cast<int64_t>(about);
  told.narrow(0, 1, numel).copy_(values);
  const at::Tensor all = all_gather(told, what);
  for (int64_t peer = 0; peer < world_; ++peer) {
    const auto theirs = static_cast<Agreement>(all.const_data_ptr<int64_t>()[peer * (1 + numel)]);
    TORCH_CHECK(theirs == about, where(global_rank()), "this rank is in ", name_of(about),
                ", rank ", global_rank(peer), " in ", name_of(theirs),
                ". Every rank must make the same calls in the same order.");
  }
  return all.narrow(1, 1, numel).contiguous().to(values.device());
}

at::Tensor Comm::all_gather(const at::Tensor& values, const std::function<std::string()>& what) {
  check_process();
  at::Tensor input = on_device() ? values.to(device_) : outgoing(values);
  at::Tensor output = at::empty({world_ * values.numel()}, input.options());
  Pending pending;
  if (has_only_local_peers()) {
    const auto row = [&](int64_t rank) {
      return output.narrow(0, rank * values.numel(), values.numel());
    };
    agreements_ = next_epoch(Kind::agreement, agreements_);
    const Label label{Kind::agreement, agreements_, agreements_};
    row(rank_).copy_(input);
    for (int64_t peer = 0; peer < world_; ++peer) {
      if (peer == rank_) continue;
      add(pending, {recv(row(peer), peer, label), output, peer, /*sending=*/false, {}});
      add(pending, {send(input, peer, label), input, peer, /*sending=*/true, {}});
    }
  } else {
    name_errors(what,
                [&] { add(pending, {all_gather_into(*gather_group_, output, input), output}); });
  }
  try {
    pending.wait(what);
    // Its message was here, but it will not do what was agreed on.
    const int64_t gone =
        has_only_local_peers() ? who_abandoned(Kind::agreement, agreements_) : int64_t{-1};
    TORCH_CHECK(gone < 0, what(), ": rank ", global_rank(gone),
                " has given up waiting for this rank. Repeat it on every rank.");
  } catch (...) {
    leave_epoch(Kind::agreement, agreements_, Exit::abandoned);
    throw;
  }
  return output.view({world_, values.numel()}).to(values.device());
}

void Comm::broadcast(const at::Tensor& tensor, const std::function<std::string()>& what) {
  if (world_ == 1) return;
  check_process();
  std::vector<at::Tensor> tensors{outgoing(tensor)};
  Pending pending;
  add(pending,
      {gather_group_->broadcast(tensors), tensors[0], Pending::kAll, false, target_of(tensor)});
  pending.wait(what);
}

void broadcast_parts(const at::Tensor& full, const std::vector<int64_t>& bounds,
                     const std::string& group) {
  const c10::intrusive_ptr<c10d::ProcessGroup> ranks = c10d::resolve_process_group(group);
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int64_t r = 0; r + 1 < std::ssize(bounds); ++r) {
    if (bounds[r] == bounds[r + 1]) continue;
    // No view: that would hold `full`, which is Python's.
    std::vector<at::Tensor> part{over_storage(full.storage(), full.scalar_type(),
                                              full.storage_offset() + bounds[r],
                                              {bounds[r + 1] - bounds[r]}, {1})};
    c10d::BroadcastOptions options;
    options.rootRank = r;
    works.push_back(ranks->broadcast(part, options));
  }
  for (const auto& work : works) work->wait();
}

}  // namespace zero_ext
