#include "core/torch_internals.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Backtrace.h>
#include <c10/util/Logging.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/cpp_stacktraces.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#if defined(__linux__)
#include <dlfcn.h>
#include <execinfo.h>
#endif

namespace zero_ext {
namespace {

// Torch has a shared_ptr for nodes before 2.13 and an intrusive_ptr since.
template <typename Pointer>
NodePtr shared(Pointer node) {
  if constexpr (std::is_same_v<Pointer, NodePtr>) {
    return node;
  } else {
    Node* bare = node.get();
    return {bare, [owner = std::move(node)](Node*) {}};
  }
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
// Torch 2.11 can forbid reads but has no function that allows them again. Without the message a
// read of released memory would end the process. The template gets at the private flag, because an
// explicit instantiation may name private members.
bool& reads_raise(c10::StorageImpl& storage);

template <bool c10::StorageImpl::* flag>
struct PrivateFlag {
  friend bool& reads_raise(c10::StorageImpl& storage) { return storage.*flag; }
};
template struct PrivateFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

// To be called before the storage gets its memory: StorageImpl sums up its flags then.
template <typename Storage>
void allow_access(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.clear_data_ptr_access_error_msg_();
  } else {
    reads_raise(storage) = false;
  }
}

// Since 2.13 a storage or a tensor keeps its Python object alive, and that object counts as a
// holder although nobody may hold it.
template <typename Object>
size_t idle_wrappers(Object& object) {
  auto* slot = object.pyobj_slot();
  if constexpr (requires { slot->has_unique_reference(); }) {
    return slot->has_unique_reference() ? 1 : 0;
  } else {
    return 0;
  }
}

// The mangled names of the functions that this thread is in, the innermost first. Those that a
// library does not export are missing.
std::vector<std::string> functions_on_stack(size_t most) {
  std::vector<std::string> names;
#if defined(__linux__)
  std::vector<void*> addresses(most);
  addresses.resize(backtrace(addresses.data(), static_cast<int>(most)));
  for (void* address : addresses) {
    Dl_info found{};
    if (dladdr(address, &found) != 0 && found.dli_sname != nullptr)
      names.emplace_back(found.dli_sname);
  }
#endif
  return names;
}

// Of the outermost "at::_ops::NAME_OVERLOAD::call" among `functions` that Python has called: the
// part with NAME and OVERLOAD.
std::string operator_among(const std::vector<std::string>& functions) {
  constexpr char kOperators[] = "_ZN2at4_ops";
  std::string op;
  for (const std::string& name : functions) {
    if (name.starts_with("_PyEval_EvalFrame")) break;
    if (!name.starts_with(kOperators)) continue;
    const size_t begin = name.find_first_not_of("0123456789", sizeof(kOperators) - 1);
    const std::string length = name.substr(sizeof(kOperators) - 1, begin - sizeof(kOperators) + 1);
    op = name.substr(begin, std::stoul(length));
  }
  return op;
}

// Every error of c10 asks the fetcher for its stack before it is thrown. That is the only place
// where an access can still get another error than its storage's.
c10::Backtrace explain_access(const AccessExplainer& explain) {
  constexpr size_t kFramesOfError = 12;
  constexpr size_t kFramesOfOperator = 96;
  thread_local bool explaining = false;  // `explain` throws errors, too
  const auto is_access = [](const std::string& name) {
    return name.find("throw_data_ptr_access_error") != std::string::npos;
  };
  const std::vector<std::string> inner = functions_on_stack(kFramesOfError);
  if (!explaining && std::any_of(inner.begin(), inner.end(), is_access)) {
    explaining = true;
    const auto end = c10::make_scope_exit([] { explaining = false; });
    explain(operator_among(functions_on_stack(kFramesOfOperator)));
  }
  return c10::get_lazy_backtrace(/*frames_to_skip=*/2);
}

// Torch has functions for some members of the running task, but none for the task.
const torch::autograd::GraphTask* torchs_running_task() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return nullptr;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr size_t kOffset = offsetof(torch::autograd::GraphTask, nodes_in_graph_);
#pragma GCC diagnostic pop
  return reinterpret_cast<const torch::autograd::GraphTask*>(reinterpret_cast<const char*>(nodes) -
                                                             kOffset);
}

}  // namespace

NodePtr accumulator_of(const at::Tensor& parameter) {
  // Only a parameter that requires a gradient can have a node. It keeps the node afterwards.
  const bool requires_grad = parameter.requires_grad();
  if (!requires_grad) parameter.set_requires_grad(true);
  NodePtr node = shared(torch::autograd::impl::grad_accumulator(parameter));
  if (!requires_grad) parameter.set_requires_grad(false);
  return node;
}

bool is_node_of(const NodePtr& node, const at::Tensor& parameter) {
  return torch::autograd::impl::try_get_grad_accumulator(parameter).get() == node.get();
}

void move_to_stream(const NodePtr& node, const at::Tensor& parameter, const c10::Stream& stream) {
  if (node->input_metadata(0).stream() == stream) return;
  node->clear_input_metadata();
  node->add_input_metadata(parameter);
}

bool reduced_by_ddp(const NodePtr& node, size_t own_hooks) {
  const auto& hooks = node->post_hooks();
  return hooks.size() != own_hooks && std::ranges::any_of(hooks, [](const auto& hook) {
           return std::strstr(typeid(*hook).name(), "LambdaPostHook") != nullptr;
         });
}

bool reduced_by_ddp(const at::Tensor& parameter) {
  const NodePtr node = shared(torch::autograd::impl::try_get_grad_accumulator(parameter));
  return node != nullptr && reduced_by_ddp(node, /*own_hooks=*/0);
}

Node* node_of(const at::TensorBase& tensor) { return tensor.grad_fn().get(); }

uint64_t next_sequence_number() { return at::sequence_number::peek(); }

uint64_t sequence_number_of(const Node& node) { return node.sequence_nr(); }

void add_hook(Node& node, std::unique_ptr<EntryHook> hook) { node.add_pre_hook(std::move(hook)); }

void add_hook(Node& node, std::unique_ptr<ExitHook> hook) { node.add_post_hook(std::move(hook)); }

torch::autograd::FunctionPreHook* find_entry_hook(const Node& node, const std::type_info& type) {
  for (const auto& hook : node.pre_hooks()) {
    if (typeid(*hook) == type) return hook.get();
  }
  return nullptr;
}

int current_task() { return torch::autograd::get_current_graph_task_id(); }

GraphTask running_task() {
  const auto* task = torchs_running_task();
  TORCH_INTERNAL_ASSERT(task != nullptr && static_cast<int>(task->id_) == current_task());
  return {.number = current_task(),
          .depth = task->reentrant_depth_,
          .is_deep = task->reentrant_depth_ > torch::autograd::MAX_DEPTH,
          .is_of_host = task->owner_ == torch::autograd::CPU_DEVICE,
          .queue = task->cpu_ready_queue_.get()};
}

bool graph_is_kept() { return torch::autograd::get_current_graph_task_keep_graph(); }

bool will_run(const NodePtr& node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || nodes->find(node.get()) == nodes->end()) return false;
  const auto* selected = torch::autograd::get_current_graph_task_exec_info();
  if (selected == nullptr || selected->empty()) return true;
  const auto found = selected->find(node.get());
  // Not where its gradient is only captured, for torch.autograd.grad().
  return found != selected->end() && found->second.needed_;
}

bool is_inside_node() { return torch::autograd::get_current_node() != nullptr; }

std::vector<at::Tensor> parameters_after_this_node() {
  constexpr size_t kMostNodes = 32;
  std::vector<at::Tensor> parameters;
  std::vector<Node*> nodes;
  const auto add_next_of = [&](const Node& node) {
    for (const auto& edge : node.next_edges()) {
      if (edge.is_valid()) nodes.push_back(edge.function.get());
    }
  };
  if (is_inside_node()) add_next_of(*torch::autograd::get_current_node());
  for (size_t n = 0; n < nodes.size() && n < kMostNodes; ++n) {
    if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(nodes[n]))
      parameters.push_back(leaf->variable);
    add_next_of(*nodes[n]);
  }
  return parameters;
}

void call_at_end_of_task(std::function<void()> action) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(action));
}

std::vector<std::string> python_functions_of_task() {
  std::vector<std::string> names;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return names;
  for (Node* node : *nodes) {
    // By the mangled name of its class, because this file links no Python.
    const bool is_python = std::strcmp(typeid(*node).name(), "N5torch8autograd6PyNodeE") == 0;
    if (is_python) names.push_back(node->name());
  }
  return names;
}

void forbid_access(c10::StorageImpl& storage, const std::string& message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

c10::DataPtr take_memory(c10::StorageImpl& storage, const std::string& message) {
  c10::DataPtr memory = storage.set_data_ptr(c10::DataPtr(nullptr, storage.device()));
  forbid_access(storage, message);
  return memory;
}

void give_memory(c10::StorageImpl& storage, c10::DataPtr memory) {
  allow_access(storage);
  storage.set_data_ptr_noswap(std::move(memory));
}

void explain_forbidden_accesses(AccessExplainer explain) {
  if (torch::get_cpp_stacktraces_enabled()) return;  // torch has a fetcher of its own then
  c10::SetStackTraceFetcher(
      [explain = std::move(explain)]() -> c10::Backtrace { return explain_access(explain); });
}

size_t holders(const c10::Storage& storage) {
  return storage.use_count() - idle_wrappers(*storage.unsafeGetStorageImpl());
}

bool is_shared(const at::Tensor& tensor) {
  return tensor.use_count() > 1 + idle_wrappers(*tensor.unsafeGetTensorImpl());
}

at::Tensor over_storage(const c10::Storage& storage, at::ScalarType dtype, int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage),
      c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, storage.device())),
      c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

}  // namespace zero_ext
