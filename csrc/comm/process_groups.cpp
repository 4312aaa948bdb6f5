#include "comm/process_groups.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <exception>
#include <future>
#include <memory>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/c10d_names.h"
#include "comm/interruptible_wait.h"
#include "core/torch_internals.h"
#include "device/streams.h"

namespace zero_ext {
namespace {

constexpr std::chrono::seconds kAnswers{1};  // a store's server does within it

int tag_of(const MessageLabel& label) { return static_cast<int>(label.tag & 0x3fffffff); }

// A collective of tensors on the host. A thread of gloo keeps what it was given until it runs again
// after the collective, on a busy machine for long. So it gets other tensors with the same memory,
// and they own that memory only until the collective was waited for.
class LentTensors final : public c10d::Work {
 public:
  template <typename Start>
  static Message start(std::vector<at::Tensor> tensors, const Start& start) {
    if (!tensors.front().is_cpu()) return start(tensors);
    auto owners = std::make_shared<std::vector<at::Tensor>>(tensors);
    for (at::Tensor& tensor : tensors) {
      tensor = at::from_blob(
          tensor.mutable_data_ptr(), tensor.sizes(), [owners](void*) {}, tensor.options());
    }
    return c10::make_intrusive<LentTensors>(start(tensors), std::move(owners));
  }

  LentTensors(Message collective, std::shared_ptr<std::vector<at::Tensor>> owners)
      : collective_(std::move(collective)), owners_(std::move(owners)) {}
  bool isCompleted() override { return collective_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    collective_->wait(timeout);
    owners_->clear();
    return true;
  }

 private:
  Message collective_;
  std::shared_ptr<std::vector<at::Tensor>> owners_;
};

// Waiting for it raises the reason, where unit and ranks are named.
class Unstarted final : public c10d::Work {
 public:
  explicit Unstarted(std::exception_ptr reason) { finish(std::move(reason)); }
};

// gloo raises what has closed a connection when the next message is posted.
template <typename Start>
Message started(const Start& start) {
  try {
    return start();
  } catch (const std::exception&) {
    return c10::make_intrusive<Unstarted>(std::current_exception());
  }
}

// `collective`: one of c10d_names.h.
template <typename Collective>
Message start_with(Collective collective, c10d::ProcessGroup& group, const at::Tensor& output,
                   const at::Tensor& input) {
  return LentTensors::start({output, input}, [&](auto& tensors) {
    return (group.*collective)(tensors[0], tensors[1], {});
  });
}

Message sum_over(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  return LentTensors::start({tensor}, [&](auto& tensors) { return group.allreduce(tensors); });
}

// Sets the key of `rank` for `occasion`, and waits for those of the others.
std::vector<int64_t> ranks_without_key(c10d::Store& store, const std::string& occasion,
                                       const std::vector<int64_t>& ranks, int64_t rank,
                                       std::chrono::milliseconds patience) {
  const auto key = [&](int64_t r) { return "zero_ext/" + occasion + "/" + std::to_string(r); };
  std::vector<std::string> keys;
  for (const int64_t r : ranks) keys.push_back(key(r));
  // Another thread may wait in the groups' own connection.
  const auto own = store.clone();
  own->set(key(rank), std::string());
  std::vector<int64_t> missing;
  try {
    own->wait(keys, patience);
  } catch (const std::exception&) {
    for (const int64_t r : ranks)
      if (!own->check({key(r)})) missing.push_back(r);
  }
  return missing;
}

}  // namespace

ProcessGroups::ProcessGroups() = default;
ProcessGroups::~ProcessGroups() = default;

ProcessGroups::ProcessGroups(const Names& names, c10::Device device)
    : device_(device),
      reduce_(c10d::resolve_process_group(names.reduce)),
      gather_(c10d::resolve_process_group(names.gather)),
      within_reduce_(reduce_),
      within_gather_(gather_),
      rank_(reduce_->getRank()),
      world_(reduce_->getSize()) {
  if (!names.across.empty()) {
    within_reduce_ = c10d::resolve_process_group(names.within_reduce);
    within_gather_ = c10d::resolve_process_group(names.within_gather);
    across_ = c10d::resolve_process_group(names.across);
  }
  shards_ = within_reduce_->getSize();
  if (device.is_cpu()) return;
  const auto backend_of = [this](c10::DeviceType type) -> c10::intrusive_ptr<c10d::Backend> {
    const std::vector<c10::Device> devices = reduce_->getDeviceTypes();
    const bool known = std::any_of(devices.begin(), devices.end(),
                                   [&](c10::Device other) { return other.type() == type; });
    return known ? reduce_->getBackend(type) : nullptr;
  };
  // gloo claims to take a device's tensors as well, but most of its collectives do not.
  const auto own = backend_of(device.type());
  const bool has_backend = own != nullptr && own != backend_of(c10::kCPU);
  carrier_ = has_backend ? Carrier::backend : Carrier::staged;
}

c10::intrusive_ptr<c10d::Store> ProcessGroups::store() const { return reduce_->getStore(); }

std::vector<int64_t> ProcessGroups::missing_at(const std::string& occasion,
                                               const std::vector<int64_t>& ranks,
                                               std::chrono::milliseconds patience) const {
  auto answer = std::make_shared<std::promise<std::vector<int64_t>>>();
  auto missing = answer->get_future();
  // In a thread: the store's server may be on a host that answers nobody any more.
  std::thread([answer, occasion, ranks, patience, rank = rank_, store = store()] {
    try {
      answer->set_value(ranks_without_key(*store, occasion, ranks, rank, patience));
    } catch (const std::exception&) {
      answer->set_value({});  // the process with the store's server has ended
    }
  }).detach();
  const auto most = std::max<std::chrono::milliseconds>(2 * patience, kAnswers);
  if (missing.wait_for(most) != std::future_status::ready) return {};
  return missing.get();
}

Message ProcessGroups::send(const at::Tensor& tensor, int64_t to, const MessageLabel& label) const {
  std::vector<at::Tensor> tensors{tensor};
  return started(
      [&] { return group_of(label.kind)->send(tensors, static_cast<int>(to), tag_of(label)); });
}

Message ProcessGroups::receive(const at::Tensor& into, int64_t from,
                               const MessageLabel& label) const {
  std::vector<at::Tensor> tensors{into};
  return started(
      [&] { return group_of(label.kind)->recv(tensors, static_cast<int>(from), tag_of(label)); });
}

Message ProcessGroups::all_to_all(std::vector<at::Tensor>& outputs,
                                  std::vector<at::Tensor>& inputs) const {
  return reduce_->alltoall(outputs, inputs);
}

Message ProcessGroups::all_gather(const at::Tensor& output, const at::Tensor& input,
                                  MessageKind among) const {
  return start_with(kAllGather, *group_of(among), output, input);
}

Message ProcessGroups::broadcast(const at::Tensor& tensor) const {
  return LentTensors::start({tensor}, [&](auto& tensors) { return gather_->broadcast(tensors); });
}

Message ProcessGroups::sum(const at::Tensor& tensor) const { return sum_over(*reduce_, tensor); }

Message ProcessGroups::reduce_scatter_in_replica(const at::Tensor& output,
                                                 const at::Tensor& input) const {
  return start_with(kReduceScatter, *within_reduce_, output, input);
}

Message ProcessGroups::all_gather_in_replica(const at::Tensor& output,
                                             const at::Tensor& input) const {
  return start_with(kAllGather, *within_gather_, output, input);
}

Message ProcessGroups::broadcast_in_replica(const at::Tensor& tensor, int64_t from) const {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  return within_gather_->broadcast(tensors, options);
}

Message ProcessGroups::sum_over_replicas(const at::Tensor& tensor) const {
  return sum_over(*across_, tensor);
}

void ProcessGroups::finish(std::chrono::milliseconds patience) const noexcept {
  if (world_ == 1 || carrier_ != Carrier::backend) return;
  try {
    c10::Event ended(device_.type());
    ended.record(current_stream(device_));
    const auto deadline = std::chrono::steady_clock::now() + patience;
    // Not synchronize(): a rank whose process has ended never takes part.
    while (!ended.query() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (const std::exception&) {
    // The device is in an error.
  }
}

void ProcessGroups::abort(std::chrono::milliseconds patience) const noexcept {
  if (world_ == 1 || carrier_ != Carrier::backend) return;
  std::vector<int64_t> ranks(world_);
  std::iota(ranks.begin(), ranks.end(), 0);
  try {
    missing_at("ended", ranks, patience);
    for (const Group& group : {reduce_, gather_}) group->abort();
    if (!has_replicas()) return;
    for (const Group& group : {within_reduce_, within_gather_, across_}) group->abort();
  } catch (const std::exception&) {
    // The device is in an error, or its backend has been aborted.
  }
}

void broadcast_parts(const at::Tensor& full, const std::vector<int64_t>& bounds,
                     const std::string& group) {
  const c10::intrusive_ptr<c10d::ProcessGroup> ranks = c10d::resolve_process_group(group);
  TORCH_CHECK_VALUE(full.is_contiguous() && !bounds.empty() && bounds.front() >= 0 &&
                        std::is_sorted(bounds.begin(), bounds.end()) &&
                        bounds.back() <= full.numel() && std::ssize(bounds) == ranks->getSize() + 1,
                    "zero_ext: bounds ", bounds, " do not cut ", full.numel(),
                    " contiguous elements into a part for each of ", ranks->getSize(), " ranks.");
  std::vector<Message> messages;
  for (int64_t r = 0; r + 1 < std::ssize(bounds); ++r) {
    if (bounds[r] == bounds[r + 1]) continue;
    // No view: that would hold `full`, which is Python's.
    const at::Tensor part =
        over_storage(full.storage(), full.scalar_type(), full.storage_offset() + bounds[r],
                     {bounds[r + 1] - bounds[r]}, {1});
    c10d::BroadcastOptions options;
    options.rootRank = r;
    messages.push_back(LentTensors::start(
        {part}, [&](auto& tensors) { return ranks->broadcast(tensors, options); }));
  }
  for (const Message& message : messages) {
    if (full.is_cpu()) {
      wait_interruptibly(message);
    } else {
      message->wait();
    }
  }
}

}  // namespace zero_ext
