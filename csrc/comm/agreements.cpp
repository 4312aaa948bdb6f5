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

at::Tensor Agreements::all_gather_unless_outdated(Agreement about, const at::Tensor& values,
                                                  int64_t state,
                                                  const std::function<std::string()>& what,
                                                  const Meanwhile& meanwhile) {
  at::Tensor all = all_gather(about, values, what, meanwhile);
  const at::Tensor states = all.select(1, state);
  return states.eq(states[0]).all().item<bool>() ? all : at::Tensor();
}

at::Tensor Agreements::all_gather(Agreement about, const at::Tensor& values,
                                  const std::function<std::string()>& what,
                                  const Meanwhile& meanwhile) {
  if (world() == 1) return values.unsqueeze(0);
  const Range range("agree", [&] { return std::string("in ") + name_of(about); });
  const CallScope call(name_of(about));
  if (by_device(values)) return gather_values(values, what, {});
  const int64_t numel = values.numel();
  const at::Tensor message = at::empty({1 + numel}, at::TensorOptions().dtype(at::kLong));
  *message.mutable_data_ptr<int64_t>() = static_cast<int64_t>(about);
  message.narrow(0, 1, numel).copy_(values);
  const at::Tensor all = gather_values(message, what, meanwhile);
  for (int64_t peer = 0; peer < world(); ++peer) {
    const auto theirs = static_cast<Agreement>(all.const_data_ptr<int64_t>()[peer * (1 + numel)]);
    TORCH_CHECK(theirs == about, where(global_rank()), "this rank is in ", name_of(about),
                ", rank ", global_rank(peer), " in ", name_of(theirs),
                ". Every rank must make the same calls in the same order.");
  }
  return all.narrow(1, 1, numel).contiguous().to(values.device());
}

at::Tensor Agreements::gather_values(const at::Tensor& values,
                                     const std::function<std::string()>& what,
                                     const Meanwhile& meanwhile) {
  check_process();
  TORCH_CHECK(!unfinished_, what(), ": an earlier wait has failed. Start all ranks again.");
  const bool crosses = by_device(values) && values.is_cpu();
  if (crosses) wait_for_stream(groups().device(), watch().get());
  const at::Tensor input = crosses ? values.to(groups().device()) : outgoing(values);
  const at::Tensor output = at::empty({world(), values.numel()}, input.options());
  Pending pending;
  start(input, output, what, pending);
  try {
    pending.wait(what, meanwhile);
    // Its message is here, but that rank will not do what was agreed on.
    const int64_t gone = way().one_host && input.is_cpu()
                             ? who_abandoned(MessageKind::agreement, epoch_)
                             : int64_t{-1};
    TORCH_CHECK(gone < 0, what(), ": ", given_up_by(gone, "Repeat it on every rank."));
  } catch (...) {
    unfinished_ = !way().one_host && input.is_cpu();
    if (input.is_cpu()) leave_epoch(MessageKind::agreement, epoch_, EpochExit::abandoned);
    throw;
  }
  if (crosses) wait_for_stream(output.device(), watch().get());
  return output.to(values.device());
}

void Agreements::start(const at::Tensor& input, const at::Tensor& output,
                       const std::function<std::string()>& what, Pending& pending) {
  if (!way().one_host || !input.is_cpu()) {
    const at::Tensor flat = output.view({-1});
    name_errors(what, [&] {
      add(pending, {.message = groups().all_gather(flat, input, among_), .tensor = flat});
    });
    return;
  }
  epoch_ = next_epoch(MessageKind::agreement, epoch_);
  const MessageLabel label{MessageKind::agreement, epoch_, epoch_};
  output[rank()].copy_(input);
  for (int64_t peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    receive(output[peer], peer, label, pending);
    send(input, peer, label, pending);
  }
}

}  // namespace zero_ext
