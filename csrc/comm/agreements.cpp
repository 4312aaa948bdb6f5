#include "comm/agreements.h"

#include <ATen/ops/empty.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/current_call.h"
#include "comm/host_wait.h"
#include "core/errors.h"
#include "core/range.h"

namespace zero_ext {

const char* name_of(Agreement about) {
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
    case Agreement::whole_parameters:
      return "iter_full_params()";
    case Agreement::clip_value:
      return "clip_grad_value_()";
    case Agreement::unfreezing:
      return "the sharding of parameters that require a gradient now";
  }
  return "another version of zero_ext";
}

at::Tensor Agreements::all_gather_unless_outdated(Peers& peers, Agreement about,
                                                  const at::Tensor& values, int64_t state,
                                                  const std::function<std::string()>& what,
                                                  const Meanwhile& meanwhile) {
  at::Tensor all = all_gather(peers, about, values, what, meanwhile);
  const at::Tensor states = all.select(1, state);
  return states.eq(states[0]).all().item<bool>() ? all : at::Tensor();
}

at::Tensor Agreements::all_gather(Peers& peers, Agreement about, const at::Tensor& values,
                                  const std::function<std::string()>& what,
                                  const Meanwhile& meanwhile) {
  if (peers.world() == 1) return values.unsqueeze(0);
  const Range range("agree", [&] { return std::string("in ") + name_of(about); });
  const CallScope call(name_of(about));
  if (by_device(peers, values)) return all_gather(peers, values, what, {});
  const int64_t numel = values.numel();
  const at::Tensor message = at::empty({1 + numel}, at::TensorOptions().dtype(at::kLong));
  *message.mutable_data_ptr<int64_t>() = static_cast<int64_t>(about);
  message.narrow(0, 1, numel).copy_(values);
  const at::Tensor all = all_gather(peers, message, what, meanwhile);
  for (int64_t peer = 0; peer < peers.world(); ++peer) {
    const auto theirs = static_cast<Agreement>(all.const_data_ptr<int64_t>()[peer * (1 + numel)]);
    TORCH_CHECK(theirs == about, where(peers.global_rank()), "this rank is in ", name_of(about),
                ", rank ", peers.global_rank(peer), " in ", name_of(theirs),
                ". Every rank must make the same calls in the same order.");
  }
  return all.narrow(1, 1, numel).contiguous().to(values.device());
}

at::Tensor Agreements::all_gather(Peers& peers, const at::Tensor& values,
                                  const std::function<std::string()>& what,
                                  const Meanwhile& meanwhile) {
  peers.check_process();
  const bool crosses = by_device(peers, values) && values.is_cpu();
  if (crosses) wait_for_stream(peers.groups().device(), peers.watch().get());
  const at::Tensor input = crosses ? values.to(peers.groups().device()) : peers.outgoing(values);
  const at::Tensor output = at::empty({peers.world(), values.numel()}, input.options());
  Pending pending;
  start(peers, input, output, what, pending);
  try {
    pending.wait(what, meanwhile);
    // Its message is here, but that rank will not do what was agreed on.
    const int64_t gone = peers.share_host() && input.is_cpu()
                             ? peers.who_abandoned(MessageKind::agreement, epoch_)
                             : int64_t{-1};
    TORCH_CHECK(gone < 0, what(), ": rank ", peers.global_rank(gone),
                " has given up waiting for this rank. Repeat it on every rank.");
  } catch (...) {
    if (input.is_cpu()) peers.leave_epoch(MessageKind::agreement, epoch_, EpochExit::abandoned);
    throw;
  }
  if (crosses) wait_for_stream(output.device(), peers.watch().get());
  return output.to(values.device());
}

void Agreements::start(Peers& peers, const at::Tensor& input, const at::Tensor& output,
                       const std::function<std::string()>& what, Pending& pending) {
  if (!peers.share_host() || !input.is_cpu()) {
    const at::Tensor flat = output.view({-1});
    name_errors(what, [&] {
      peers.add(pending,
                {.message = peers.groups().all_gather(flat, input, peers.agreements_among_),
                 .tensor = flat});
    });
    return;
  }
  epoch_ = peers.next_epoch(MessageKind::agreement, epoch_);
  const MessageLabel label{MessageKind::agreement, epoch_, epoch_};
  output[peers.rank()].copy_(input);
  for (int64_t peer = 0; peer < peers.world(); ++peer) {
    if (peer == peers.rank()) continue;
    peers.receive(output[peer], peer, label, pending);
    peers.send(input, peer, label, pending);
  }
}

}  // namespace zero_ext
