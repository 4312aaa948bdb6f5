#include "autograd/call.h"

#include <utility>

namespace zero_ext {

class Call::OutputHook : public EntryHook {
 public:
  explicit OutputHook(std::shared_ptr<Call> call) : call_(std::move(call)) {}
  void run() override {
    if (auto listener = call_->listener_.lock()) listener->call_entered(call_);
  }

 private:
  std::shared_ptr<Call> call_;
};

// One hook for all calls with the same input, because an input may outlive many calls.
class Call::InputHook : public EntryHook {
 public:
  static InputHook& on(Node& node) {
    if (auto* found = find_hook<InputHook>(node)) return *found;
    auto made = std::make_unique<InputHook>();
    InputHook& hook = *made;
    add_hook(node, std::move(made));
    return hook;
  }

  void add(std::weak_ptr<Call> call) {
    std::erase_if(calls_, [](const std::weak_ptr<Call>& each) { return each.expired(); });
    calls_.push_back(std::move(call));
  }

  void run() override {
    const std::vector<std::weak_ptr<Call>> calls = calls_;  // which may gain some meanwhile
    for (const std::weak_ptr<Call>& each : calls) {
      const std::shared_ptr<Call> call = each.lock();
      if (call == nullptr) continue;
      if (auto listener = call->listener_.lock()) listener->call_left(call);
    }
  }

 private:
  std::vector<std::weak_ptr<Call>> calls_;
};

std::shared_ptr<Call> Call::begin(std::weak_ptr<BackwardListener> listener, int64_t site,
                                  const std::vector<at::Tensor>& inputs) {
  std::shared_ptr<Call> call(new Call(std::move(listener), site));
  for (const at::Tensor& input : inputs) {
    if (!input.requires_grad()) continue;
    call->watch_input(node_of(input));
    if (input.is_view()) call->watch_input(node_of(input._base()));
  }
  return call;
}

void Call::watch_input(Node* node) {
  if (node == nullptr || !inputs_.insert(node).second) return;
  InputHook::on(*node).add(weak_from_this());
}

void Call::end(const std::vector<at::Tensor>& outputs) {
  end_ = next_sequence_number();
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    watch_output(node_of(output));
    if (!output.is_view()) continue;
    Node* base = node_of(output._base());
    if (base != nullptr && sequence_number_of(*base) >= begin_) watch_output(base);
  }
}

void Call::watch_output(Node* node) {
  if (node == nullptr || inputs_.count(node) > 0) return;
  add_hook(*node, std::make_unique<OutputHook>(shared_from_this()));
}

}  // namespace zero_ext
