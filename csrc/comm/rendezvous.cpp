#include "comm/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

namespace zero_ext {
namespace {

using std::chrono::milliseconds;
using Keys = std::vector<std::string>;
using Bytes = std::vector<uint8_t>;

// torch's keys are "KIND/NUMBER" or begin with "KIND/NUMBER/". Here each number is replaced by how
// many others came before it.
class NumberedAlike final : public c10d::Store {
 public:
  NumberedAlike(c10::intrusive_ptr<c10d::Store> store, std::string prefix, milliseconds timeout)
      : Store(timeout), store_(std::move(store)), prefix_(std::move(prefix)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<NumberedAlike>(store_->clone(), prefix_, timeout_);
  }
  using Store::set;
  void set(const std::string& key, const Bytes& value) override { store_->set(own(key), value); }
  Bytes get(const std::string& key) override {
    wait({key});
    return store_->get(own(key));
  }
  int64_t add(const std::string& key, int64_t value) override {
    return store_->add(own(key), value);
  }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(own(key)); }
  bool check(const Keys& keys) override { return store_->check(own(keys)); }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const Keys& keys) override { wait(keys, timeout_); }
  void wait(const Keys& keys, const milliseconds& timeout) override {
    store_->wait(own(keys), timeout);
  }

 private:
  std::string own(const std::string& key) {
    const size_t begin = std::min(key.find('/'), key.size());
    const size_t end = std::min(key.find('/', begin + 1), key.size());
    const auto number =
        numbers_.try_emplace(key.substr(begin, end - begin), std::ssize(numbers_)).first;
    return prefix_ + "/" + std::to_string(number->second) + key.substr(end);
  }
  Keys own(Keys keys) {
    for (std::string& key : keys) key = own(std::as_const(key));
    return keys;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
  std::map<std::string, int64_t> numbers_;
};

// torch knows groups by their names, and takes none twice in a process.
std::string unique_name() {
  static std::atomic<int64_t> made{0};
  return "zero_ext/devices/" + std::to_string(made++);
}

}  // namespace

Rendezvous::Rendezvous(int64_t rank, int64_t world, const c10::intrusive_ptr<c10d::Store>& store,
                       const std::string& key, milliseconds timeout)
    : name_(unique_name()),
      group_(c10::make_intrusive<c10d::ProcessGroup>(
          c10::make_intrusive<NumberedAlike>(store, key, timeout), static_cast<int>(rank),
          static_cast<int>(world))) {
  c10d::register_process_group(name_, group_);
}

Rendezvous::~Rendezvous() { c10d::unregister_process_group(name_); }

}  // namespace zero_ext
