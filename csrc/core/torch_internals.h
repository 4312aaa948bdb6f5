// Everything of ours that leans on parts of torch which its documentation does not promise: nodes
// of autograd's graph, the running graph task, the insides of storages.
//
// Tested on torch 2.13, compiled on 2.11. For another version read torch_internals.cpp first, then
// device/streams.cpp (c10's guard for any device) and comm/c10d_names.h (names of c10d's
// collectives).
//
// Threads: nothing here locks. Autograd runs hooks on its own threads, without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

namespace zero_ext {

// A node of autograd's graph, which is only declared here: autograd's headers take longer to
// compile than most of our files.
using Node = torch::autograd::Node;
// Keeps a node alive, whichever pointer this version of torch has for it.
using NodePtr = std::shared_ptr<Node>;

// ---- The node of a parameter ----

// The parameter's AccumulateGrad. Autograd holds it only weakly: it lives, with its hooks, as long
// as the result. A frozen parameter keeps the node for when it is unfrozen.
[[nodiscard]] NodePtr accumulator_of(const at::Tensor& parameter);
// Autograd makes another node when the dtype or the device of the parameter changes.
bool is_node_of(const NodePtr& node, const at::Tensor& parameter);
// On a device, between backwards: the parameter's `node` runs on `stream` from now on, as if a
// forward had made it there.
void move_to_stream(const NodePtr& node, const at::Tensor& parameter, const c10::Stream& stream);
// DistributedDataParallel's reducer has its hook on the parameter.
bool reduced_by_ddp(const at::Tensor& parameter);
// The same of its `node`, which has `own_hooks` of this library.
bool reduced_by_ddp(const NodePtr& node, size_t own_hooks);

// ---- The nodes of a forward ----

// The node that made `tensor`, or null. It lives as long as the tensor, unless that is written to.
Node* node_of(const at::TensorBase& tensor);
// This thread's nodes have growing numbers: the next one's, and that of `node`.
uint64_t next_sequence_number();
uint64_t sequence_number_of(const Node& node);

// ---- Hooks ----

// Runs whenever autograd enters a node.
class EntryHook : public torch::autograd::FunctionPreHook {
 public:
  virtual void run() = 0;

 private:
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& grads) final {
    run();
    return grads;
  }
};

// Runs whenever a node has run.
class ExitHook : public torch::autograd::FunctionPostHook {
 public:
  virtual void run() = 0;

 private:
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& outputs,
                                     const std::vector<at::Tensor>& /*inputs*/) final {
    run();
    return outputs;
  }
};

void add_hook(Node& node, std::unique_ptr<EntryHook> hook);
void add_hook(Node& node, std::unique_ptr<ExitHook> hook);

torch::autograd::FunctionPreHook* find_entry_hook(const Node& node, const std::type_info& type);
// The first hook of class `Hook` on the node, or null.
template <typename Hook>
Hook* find_hook(const Node& node) {
  return static_cast<Hook*>(find_entry_hook(node, typeid(Hook)));
}

// ---- The graph task that this thread runs ----

// Its number, or -1. Numbers grow.
int current_task();
struct GraphTask {
  int number = -1;
  // How many tasks this thread, and those that wait for it, were in when the task began: 0 for the
  // outermost one.
  int depth = 0;
  // Autograd begins another thread for each 61st task inside the others: the task may end on
  // another thread than the one that waits for it.
  bool is_deep = false;
  // A thread of the host began it, which is none of a device's threads.
  bool is_of_host = true;
  // Tasks inside of each other have the same queue on the host, whichever threads run them.
  const void* queue = nullptr;
};
// Only inside a task.
GraphTask running_task();
// It keeps its graph (retain_graph, create_graph).
bool graph_is_kept();
// It will execute `node`.
bool will_run(const NodePtr& node);
// This thread is inside a node, which has called what runs now.
bool is_inside_node();
// The parameters whose gradients come soon after the running node, the nearest first: those that it
// may have saved. None outside of a node.
std::vector<at::Tensor> parameters_after_this_node();
// Calls `action` when the task ends. A task that throws destroys it without a call.
void call_at_end_of_task(std::function<void()> action);
// The names of all nodes in its graph that are Python functions (torch.autograd.Function).
std::vector<std::string> python_functions_of_task();

// ---- Storages without memory ----
// Tensors over such a storage stay valid. Reading or writing one raises an error.

// The storage has no memory: access raises `message`.
void forbid_access(c10::StorageImpl& storage, const std::string& message);
// Takes the storage's memory away and returns it. From then on access raises `message`.
c10::DataPtr take_memory(c10::StorageImpl& storage, const std::string& message);
void give_memory(c10::StorageImpl& storage, c10::DataPtr memory);

// `explain` runs when such an access is about to raise, on any thread, with or without the GIL. What
// it throws is raised in place of the storage's message. It gets the name of the ATen operator that
// was called from outside ("lerp_"), or "". Without effect where torch was asked for C++ stacks.
using AccessExplainer = std::function<void(const std::string& op)>;
void explain_forbidden_accesses(AccessExplainer explain);

// How many tensors, or other objects, hold the storage.
size_t holders(const c10::Storage& storage);
inline bool is_shared(const c10::Storage& storage) { return holders(storage) > 1; }
// Another object than the caller holds the tensor, in Python or in C++.
bool is_shared(const at::Tensor& tensor);

// A tensor of any dense shape over the elements from `offset`.
at::Tensor over_storage(const c10::Storage& storage, at::ScalarType dtype, int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace zero_ext
