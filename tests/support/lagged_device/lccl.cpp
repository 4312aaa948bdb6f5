#include "lccl.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <iterator>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "runtime.h"

namespace lagged {
namespace {

using at::Tensor;
using c10::Device;
using c10d::OpType;
using c10d::Work;
using std::chrono::milliseconds;
using Kind = Agreement::Kind;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

// torch 2.11 has no name of its own for it.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
constexpr OpType kReduceScatterCoalesced = OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else
constexpr OpType kReduceScatterCoalesced = OpType::_REDUCE_SCATTER_BASE;
#endif

// One call, or those between startCoalescing() and endCoalescing().
struct Call {
  OpType type;
  Device device;
  milliseconds timeout;
  Tensors kept;     // all that it touches
  Tensors outputs;  // those that are its result
  std::vector<Collective> collectives;
  std::vector<Message> messages;
};

// What a work and its task have in common.
struct Shared {
  std::mutex mutex;  // protects all below
  Tensors kept;
  std::exception_ptr error;

  void let_go() {
    Tensors gone;  // destroyed without the lock
    const std::lock_guard lock(mutex);
    gone.swap(kept);
  }
  std::exception_ptr get_error() {
    const std::lock_guard lock(mutex);
    return error;
  }
};

std::string without_backtrace(const char* what) {
  const std::string text = what;
  return text.substr(0, text.find("\nException raised from"));
}

// NCCL's ranks notice nothing of another one's abort for as long.
constexpr std::chrono::seconds kAbortsTogether{5};

// Threads: the stream's.
void run(const Call& call, const std::string& where, Wire& wire, const std::atomic<bool>& cut,
         Shared& shared) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::NoGradGuard no_grad;
  std::string name = c10d::opTypeToString(call.type);
  try {
    if (!call.messages.empty()) run_messages(call.messages, *wire, call.timeout);
    for (const Collective& collective : call.collectives) {
      name = name_of(collective.agreement.kind);
      collective.run(*wire, call.timeout, cut);
    }
  } catch (const std::exception& error) {
    if (cut) {
      // Its destructor waits for the messages that are under way: not on the stream's thread.
      std::thread([unfinished = std::move(wire)] {}).detach();
      return;
    }
    const std::string text = where + " " + name + ": " + without_backtrace(error.what());
    const std::lock_guard lock(shared.mutex);
    try {
      C10_THROW_ERROR(DistBackendError, text);
    } catch (...) {
      shared.error = std::current_exception();
    }
    throw std::runtime_error(text);
  }
}

class LcclWork final : public Work {
 public:
  LcclWork(int rank, OpType type, Device device, Tensors outputs, std::string where,
           std::shared_ptr<Shared> shared, Queue& queue, uint64_t ticket)
      : Work(rank, type),
        where_(std::move(where)),
        device_(device),
        outputs_(std::move(outputs)),
        shared_(std::move(shared)),
        queue_(queue),
        ticket_(ticket) {
    // As NCCL's: completed at once, for streams that wait for the events that it records now.
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, device_, queue.id));
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<Device>{device_});
    future_->markCompleted(c10::IValue(outputs_));
  }

  bool isCompleted() override { return queue_.is_done(ticket_); }
  bool isSuccess() const override { return queue_.is_done(ticket_) && !shared_->get_error(); }
  std::exception_ptr exception() const override { return shared_->get_error(); }
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void synchronize() override {
    current_queue(device_.index()).push_wait(queue_, ticket_);
    shared_->let_go();
  }

  bool wait(milliseconds timeout) override {
    synchronize();
    if (timeout != kNoTimeout) {
      if (!queue_.wait_for(ticket_, timeout)) {
        C10_THROW_ERROR(DistBackendError, where_ + " " + c10d::opTypeToString(opType_) +
                                              ": not done within " +
                                              std::to_string(timeout.count()) + " ms");
      }
    }
    if (timeout != kNoTimeout || opType_ == OpType::BARRIER) queue_.wait(ticket_);
    if (const auto error = shared_->get_error()) std::rethrow_exception(error);
    return true;
  }

 private:
  const std::string where_;
  const Device device_;
  const Tensors outputs_;
  const std::shared_ptr<Shared> shared_;
  Queue& queue_;
  const uint64_t ticket_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

int64_t bytes_of(const Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

Piece piece_of(const Tensor& tensor) {
  return {static_cast<char*>(tensor.mutable_data_ptr()), bytes_of(tensor)};
}

// The n-th of `count` equal ranges.
Piece range_of(const Tensor& tensor, int64_t n, int64_t count) {
  const int64_t bytes = bytes_of(tensor) / count;
  return {static_cast<char*>(tensor.mutable_data_ptr()) + n * bytes, bytes};
}

void copy_to(const Piece& piece, const void* source) {
  if (piece.bytes > 0) std::memcpy(piece.data, source, piece.bytes);
}

// Both ways of alltoall_base to say who gets what: rows of dimension 0, equally many where `splits`
// is empty.
std::vector<Piece> rows_of(const Tensor& tensor, const std::vector<int64_t>& splits,
                           int64_t world) {
  c10d::checkSplitSizes(splits, tensor, static_cast<int>(world));
  const int64_t rows = tensor.size(0);
  const int64_t row_bytes = rows > 0 ? bytes_of(tensor) / rows : 0;
  std::vector<Piece> pieces;
  char* at = static_cast<char*>(tensor.mutable_data_ptr());
  for (int64_t rank = 0; rank < world; ++rank) {
    const int64_t bytes = (splits.empty() ? rows / world : splits[rank]) * row_bytes;
    pieces.push_back({at, bytes});
    at += bytes;
  }
  return pieces;
}

// In the order of ranks, in the tensor's dtype.
Tensor reduced(const std::vector<const char*>& parts, int64_t numel, const Agreement& agreement) {
  const auto part = [&](size_t rank) {
    return at::from_blob(const_cast<char*>(parts[rank]), {numel}, agreement.dtype);
  };
  Tensor result = part(0).clone();
  for (size_t rank = 1; rank < parts.size(); ++rank) {
    switch (agreement.op) {
      case c10d::ReduceOp::PRODUCT:
        result.mul_(part(rank));
        break;
      case c10d::ReduceOp::MIN:
        result = at::minimum(result, part(rank));
        break;
      case c10d::ReduceOp::MAX:
        result = at::maximum(result, part(rank));
        break;
      default:
        result.add_(part(rank));
    }
  }
  if (agreement.op == c10d::ReduceOp::AVG) result.div_(static_cast<int64_t>(parts.size()));
  return result;
}

std::atomic<int64_t> aborts{0};
std::mutex late_mutex;  // for late_connections
std::string late_connections;

void note_late_connection(const std::string& what) {
  const std::lock_guard lock(late_mutex);
  late_connections += what + "\n";
}

class Lccl final : public c10d::Backend {
 public:
  Lccl(Wire wire, milliseconds timeout)
      : Backend(wire->getRank(), wire->getSize()),
        wire_(std::move(wire)),
        options_(c10::make_intrusive<Options>("lccl", timeout)) {
    init();
  }

  ~Lccl() override {
    cut_->store(true);
    for (int device = 0; device < kDevices; ++device) {
      if (streams_[device] >= 0) give_back_group_stream(device, streams_[device]);
    }
  }

  void abort() override {
    aborts.fetch_add(1);
    cut_->store(true);
    if (last_.queue == nullptr || last_.queue->is_done(last_.ticket)) return;
    // Without it the connections close with the group: an error for ranks that abort a moment later.
    std::thread([held = wire_] { std::this_thread::sleep_for(kAbortsTogether); }).detach();
  }

  const std::string getBackendName() const override { return "lccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return allreduce_all(OpType::ALLREDUCE, tensors, options);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce_all(OpType::ALLREDUCE_COALESCED, tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Tensor& tensor = only(tensors, "reduce");
    Call call = start(OpType::REDUCE, options.timeout, tensors, tensors);
    Collective collective = plan(Kind::reduce, tensor, options.rootRank, options.reduceOp);
    collective.sends[options.rootRank] = piece_of(tensor);
    if (rank_ == options.rootRank) collective.received_bytes.assign(size_, bytes_of(tensor));
    deliver_reduced(collective, rank_ == options.rootRank ? piece_of(tensor) : Piece{});
    call.collectives.push_back(std::move(collective));
    return submit(std::move(call));
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Tensor& tensor = only(tensors, "broadcast");
    Call call = start(OpType::BROADCAST, options.timeout, tensors, tensors);
    Collective collective = plan(Kind::broadcast, tensor, options.rootRank);
    if (rank_ == options.rootRank) collective.sends.assign(size_, piece_of(tensor));
    collective.received_bytes[options.rootRank] = bytes_of(tensor);
    std::vector<Piece> targets(size_);
    targets[options.rootRank] = piece_of(tensor);
    deliver_to(collective, std::move(targets));
    call.collectives.push_back(std::move(collective));
    return submit(std::move(call));
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    const Tensor& input = only(inputs, "allgather");
    const Tensors& list = lists_of_world(outputs, "allgather")[0];
    Call call = start(OpType::ALLGATHER, options.timeout, inputs, list);
    call.collectives.push_back(gathering(input, pieces_of(list)));
    return submit(std::move(call));
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Tensors outputs{output};
    Tensors inputs{input};
    return allgather_all(OpType::_ALLGATHER_BASE, outputs, inputs, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return allgather_all(OpType::COALESCED, outputs, inputs, options);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const Tensor& input = only(inputs, "gather");
    const bool at_root = rank_ == options.rootRank;
    const Tensors list = at_root ? lists_of_world(outputs, "gather")[0] : Tensors();
    Call call = start(OpType::GATHER, options.timeout, inputs, list);
    Collective collective = plan(Kind::gather, input, options.rootRank);
    collective.sends[options.rootRank] = piece_of(input);
    deliver_to(collective, at_root ? pieces_of(list) : std::vector<Piece>(size_));
    call.collectives.push_back(std::move(collective));
    return submit(std::move(call));
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const Tensor& output = only(outputs, "scatter");
    const bool at_root = rank_ == options.rootRank;
    const Tensors list = at_root ? lists_of_world(inputs, "scatter")[0] : Tensors();
    Call call = start(OpType::SCATTER, options.timeout, list, outputs);
    Collective collective = plan(Kind::scatter, output, options.rootRank);
    if (at_root) collective.sends = pieces_of(list);
    std::vector<Piece> targets(size_);
    targets[options.rootRank] = piece_of(output);
    deliver_to(collective, std::move(targets));
    call.collectives.push_back(std::move(collective));
    return submit(std::move(call));
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const Tensor& output = only(outputs, "reduce_scatter");
    const Tensors& list = lists_of_world(inputs, "reduce_scatter")[0];
    Call call = start(OpType::REDUCE_SCATTER, options.timeout, list, outputs);
    call.collectives.push_back(scattering(output, pieces_of(list), options.reduceOp));
    return submit(std::move(call));
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output};
    Tensors inputs{input};
    return reduce_scatter_all(OpType::_REDUCE_SCATTER_BASE, outputs, inputs, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_all(kReduceScatterCoalesced, outputs, inputs, options);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    check(outputs.size() == inputs.size() && std::ssize(inputs) == size_, "alltoall",
          "needs a tensor for each rank");
    Call call = start(OpType::ALLTOALL, options.timeout, inputs, outputs);
    Collective collective = plan(Kind::alltoall, inputs[0]);
    collective.sends = pieces_of(inputs);
    deliver_to(collective, pieces_of(outputs));
    call.collectives.push_back(std::move(collective));
    return submit(std::move(call));
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    Call call = start(OpType::ALLTOALL_BASE, options.timeout, {input}, {output});
    Collective collective = plan(Kind::alltoall, input);
    collective.sends = rows_of(input, input_splits, size_);
    deliver_to(collective, rows_of(output, output_splits, size_));
    call.collectives.push_back(std::move(collective));
    return submit(std::move(call));
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    int index = current_device();
    if (options.device && options.device->has_index()) {
      index = options.device->index();
    } else if (!options.device_ids.empty()) {
      index = static_cast<int>(options.device_ids[0]);
    }
    Call call = start(OpType::BARRIER, options.timeout, {}, {});
    call.device = Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index));
    Collective collective = plan(Kind::barrier, {});
    deliver_to(collective, std::vector<Piece>(size_));
    call.collectives.push_back(std::move(collective));
    return submit(std::move(call));
  }

  // As NCCL, they know no tags.
  WorkPtr send(Tensors& tensors, int target, int /*tag*/) override {
    Call call = start(OpType::SEND, c10d::kUnsetTimeout, tensors, {});
    call.messages.push_back({target, true, piece_of(only(tensors, "send"))});
    return submit(std::move(call));
  }
  WorkPtr recv(Tensors& tensors, int source, int /*tag*/) override {
    Call call = start(OpType::RECV, c10d::kUnsetTimeout, {}, tensors);
    call.messages.push_back({source, false, piece_of(only(tensors, "recv"))});
    return submit(std::move(call));
  }

  // Calls return null until endCoalescing(), which queues them as one.
  void startCoalescing() override { coalesces_ = true; }
  WorkPtr endCoalescing() override {
    coalesces_ = false;
    if (!coalesced_) return {};
    Call call = std::move(*coalesced_);
    coalesced_.reset();
    return submit(std::move(call));
  }

 private:
  std::string where(uint64_t number) const {
    return "lccl [rank " + std::to_string(rank_) + " of " + std::to_string(size_) + ", call " +
           std::to_string(number) + (pg_desc_.empty() ? "" : " of " + pg_desc_) + "]:";
  }

  template <typename... Facts>
  void check(bool condition, const char* name, const Facts&... facts) const {
    TORCH_CHECK_VALUE(condition, where(number_ + 1), " ", name, " ", facts...);
  }

  const Tensor& only(const Tensors& tensors, const char* name) const {
    check(tensors.size() == 1, name, "takes one tensor, not ", tensors.size());
    return tensors[0];
  }

  const std::vector<Tensors>& lists_of_world(const std::vector<Tensors>& lists,
                                             const char* name) const {
    check(lists.size() == 1 && std::ssize(lists[0]) == size_, name,
          "needs one list, of a tensor for each rank");
    return lists;
  }

  static std::vector<Piece> pieces_of(const Tensors& tensors) {
    std::vector<Piece> pieces;
    for (const Tensor& tensor : tensors) pieces.push_back(piece_of(tensor));
    return pieces;
  }

  Call start(OpType type, milliseconds timeout, const Tensors& inputs,
             const Tensors& outputs) const {
    Call call{.type = type,
              .device = Device(c10::kPrivateUse1, 0),
              .timeout = timeout == c10d::kUnsetTimeout ? options_->timeout : timeout,
              .kept = inputs,
              .outputs = outputs};
    call.kept.insert(call.kept.end(), outputs.begin(), outputs.end());
    const std::string name = c10d::opTypeToString(type);
    for (const Tensor& tensor : call.kept) check_tensor(tensor, call.kept[0], name.c_str());
    if (!call.kept.empty()) call.device = call.kept[0].device();
    return call;
  }

  void check_tensor(const Tensor& tensor, const Tensor& first, const char* name) const {
    constexpr std::array dtypes{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt,
                                at::kLong,  at::kByte,   at::kChar,     at::kBool};
    check(tensor.is_privateuseone(), name, "got a tensor on ", tensor.device(),
          "; only tensors on lagged devices can be sent");
    check(tensor.device() == first.device() && tensor.dtype() == first.dtype(), name,
          "got tensors on ", first.device(), " and ", tensor.device(), ", of ", first.dtype(),
          " and ", tensor.dtype());
    check(tensor.is_contiguous(tensor.suggest_memory_format()), name,
          "needs contiguous tensors, not sizes ", tensor.sizes(), " with strides ",
          tensor.strides());
    check(std::find(dtypes.begin(), dtypes.end(), tensor.scalar_type()) != dtypes.end(), name,
          "cannot send ", tensor.dtype());
  }

  // `of`: for its dtype; may be undefined.
  Collective plan(Kind kind, const Tensor& of, int64_t root = -1,
                  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED) const {
    check(root < size_, name_of(kind), "has the root ", root);
    check(op <= c10d::ReduceOp::MAX || op == c10d::ReduceOp::UNUSED, name_of(kind),
          "has the operation number ", static_cast<int>(op),
          "; there are SUM, AVG, PRODUCT, MIN and MAX");
    check(op != c10d::ReduceOp::AVG || of.is_floating_point(), name_of(kind),
          "cannot average integers");
    const auto dtype = of.defined() ? of.scalar_type() : at::kByte;
    return {.agreement = {.kind = kind, .dtype = dtype, .op = op, .root = root},
            .sends = std::vector<Piece>(size_),
            .received_bytes = std::vector<int64_t>(size_)};
  }

  static void deliver_to(Collective& collective, std::vector<Piece> targets) {
    for (size_t rank = 0; rank < targets.size(); ++rank) {
      collective.received_bytes[rank] = targets[rank].bytes;
    }
    collective.deliver = [targets = std::move(targets)](const auto& received) {
      for (size_t rank = 0; rank < targets.size(); ++rank) copy_to(targets[rank], received[rank]);
    };
  }

  static void deliver_reduced(Collective& collective, const Piece& target) {
    const auto element_bytes = static_cast<int64_t>(c10::elementSize(collective.agreement.dtype));
    collective.deliver = [target, numel = target.bytes / element_bytes,
                          agreement = collective.agreement](const auto& received) {
      if (target.bytes == 0) return;
      copy_to(target, reduced(received, numel, agreement).const_data_ptr());
    };
  }

  Collective gathering(const Tensor& input, std::vector<Piece> targets) const {
    Collective collective = plan(Kind::allgather, input);
    collective.sends.assign(size_, piece_of(input));
    deliver_to(collective, std::move(targets));
    return collective;
  }

  Collective scattering(const Tensor& output, std::vector<Piece> sources,
                        c10d::ReduceOp::RedOpType op) const {
    Collective collective = plan(Kind::reduce_scatter, output, -1, op);
    collective.sends = std::move(sources);
    collective.received_bytes.assign(size_, bytes_of(output));
    deliver_reduced(collective, piece_of(output));
    return collective;
  }

  std::vector<Piece> ranges_of(const Tensor& tensor) const {
    std::vector<Piece> ranges;
    for (int64_t rank = 0; rank < size_; ++rank) ranges.push_back(range_of(tensor, rank, size_));
    return ranges;
  }

  WorkPtr allreduce_all(OpType type, Tensors& tensors, const c10d::AllreduceOptions& options) {
    Call call = start(type, options.timeout, tensors, tensors);
    for (const Tensor& tensor : tensors) {
      Collective collective = plan(Kind::allreduce, tensor, -1, options.reduceOp);
      collective.sends.assign(size_, piece_of(tensor));
      collective.received_bytes.assign(size_, bytes_of(tensor));
      deliver_reduced(collective, piece_of(tensor));
      call.collectives.push_back(std::move(collective));
    }
    return submit(std::move(call));
  }

  WorkPtr allgather_all(OpType type, Tensors& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& options) {
    check(outputs.size() == inputs.size(), "allgather", "needs an output for each input");
    Call call = start(type, options.timeout, inputs, outputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      check(outputs[i].numel() == size_ * inputs[i].numel(), "allgather", "of ", inputs[i].numel(),
            " elements into ", outputs[i].numel());
      call.collectives.push_back(gathering(inputs[i], ranges_of(outputs[i])));
    }
    return submit(std::move(call));
  }

  WorkPtr reduce_scatter_all(OpType type, Tensors& outputs, Tensors& inputs,
                             const c10d::ReduceScatterOptions& options) {
    check(outputs.size() == inputs.size(), "reduce_scatter", "needs an output for each input");
    Call call = start(type, options.timeout, inputs, outputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      check(inputs[i].numel() == size_ * outputs[i].numel(), "reduce_scatter", "of ",
            inputs[i].numel(), " elements into ", outputs[i].numel());
      call.collectives.push_back(scattering(outputs[i], ranges_of(inputs[i]), options.reduceOp));
    }
    return submit(std::move(call));
  }

  WorkPtr submit(Call call) {
    if (coalesces_) {
      add_to_coalesced(std::move(call));
      return {};
    }
    ++number_;
    if (used_.insert(call.type).second && torch::autograd::get_current_graph_task_id() >= 0) {
      note_late_connection(where(number_) + " " + c10d::opTypeToString(call.type));
    }
    Queue& queue = stream_of(call.device.index());
    // Devices have streams of their own, but the wire has one order.
    if (last_.queue != nullptr) queue.push_wait(*last_.queue, last_.ticket);
    Queue& current = current_queue(call.device.index());
    queue.push_wait(current, current.last_ticket());
    auto shared = std::make_shared<Shared>();
    shared->kept = std::move(call.kept);
    // The task holds no tensors but those: see Queue::push about what tasks own.
    auto plain = std::make_shared<Call>(std::move(call));
    const Tensors outputs = std::move(plain->outputs);
    plain->outputs.clear();
    plain->kept.clear();
    const std::string place = where(number_);
    // The wire is let go at once: a group that nobody has any more must close its connections, for
    // the sake of ranks that still wait for this one.
    const uint64_t ticket = queue.push([plain, shared, place, wire = wire_, cut = cut_]() mutable {
      Wire last_use = std::move(wire);
      if (cut->load()) return;
      run(*plain, place, last_use, *cut, *shared);
    });
    last_ = {.queue = &queue, .ticket = ticket};
    return c10::make_intrusive<LcclWork>(rank_, plain->type, plain->device, outputs, place,
                                         std::move(shared), queue, ticket);
  }

  void add_to_coalesced(Call call) {
    if (!coalesced_) {
      coalesced_ = std::move(call);
      coalesced_->type = OpType::COALESCED;
      return;
    }
    check(coalesced_->device == call.device, "coalescing", "of tensors on several devices");
    const auto append = [](auto& all, auto& more) {
      std::move(more.begin(), more.end(), std::back_inserter(all));
    };
    append(coalesced_->kept, call.kept);
    append(coalesced_->outputs, call.outputs);
    append(coalesced_->collectives, call.collectives);
    append(coalesced_->messages, call.messages);
  }

  Queue& stream_of(int device) {
    if (streams_[device] < 0) streams_[device] = borrow_group_stream(device);
    return queue(device, streams_[device]);
  }

  const Wire wire_;
  const std::shared_ptr<std::atomic<bool>> cut_ = std::make_shared<std::atomic<bool>>(false);
  const c10::intrusive_ptr<Options> options_;
  std::array<int64_t, kDevices> streams_ = [] {
    std::array<int64_t, kDevices> none{};
    none.fill(-1);
    return none;
  }();
  Event last_;  // of the last call
  uint64_t number_ = 0;
  std::set<OpType> used_;
  bool coalesces_ = false;
  std::optional<Call> coalesced_;
};

}  // namespace

Wire make_lccl(Wire wire, milliseconds timeout) {
  return c10::make_intrusive<Lccl>(std::move(wire), timeout);
}

}  // namespace lagged

LAGGED_EXPORT int64_t lagged_aborts() { return lagged::aborts; }
LAGGED_EXPORT const char* lagged_late_connections() {
  static std::string copy;
  const std::lock_guard lock(lagged::late_mutex);
  copy = lagged::late_connections;
  return copy.c_str();
}
