#include "reduce/notices.h"

#include <ATen/ops/empty.h>

#include <atomic>

namespace zero_ext {
namespace {

constexpr int64_t kNoticeTag = 0x3ffffffd;
constexpr int64_t kNothing = -1;

// The number of agreements, then the epoch: when that is here, both are.
at::Tensor notice(int64_t agreements, int64_t epoch) {
  const at::Tensor tensor = at::empty({2}, at::TensorOptions().dtype(at::kLong).device(at::kCPU));
  tensor.mutable_data_ptr<int64_t>()[0] = agreements;
  tensor.mutable_data_ptr<int64_t>()[1] = epoch;
  return tensor;
}

// A thread of the process group may be writing it.
int64_t read(const at::Tensor& notice, int64_t i) {
  return std::atomic_ref<int64_t>(notice.mutable_data_ptr<int64_t>()[i]).load();
}

int64_t epoch_of(const at::Tensor& notice) { return read(notice, 1); }
int64_t agreements_of(const at::Tensor& notice) { return read(notice, 0); }

}  // namespace

void Notices::send(int64_t epoch, int64_t agreements) {
  post_receives();
  for (int64_t peer = 0; peer < comm_.world(); ++peer) {
    if (peer == comm_.rank()) continue;
    sent_.emplace_back(epoch, comm_.post_send(notice(agreements, epoch), peer, kNoticeTag));
  }
}

void Notices::finish(int64_t epoch, const std::function<std::string()>& what) {
  for (bool all = false; !all;) {
    receiving_.wait(what);
    all = true;
    for (int64_t peer = 0; peer < comm_.world(); ++peer) {
      // An older one is of a backward that threw.
      if (peer == comm_.rank() || epoch_of(received_[peer]) >= epoch) continue;
      all = false;
      post_receive(peer);
    }
  }
  received_.clear();
  std::erase_if(sent_, [&](const auto& notice) { return notice.first < last_finished_; });
  last_finished_ = epoch;
}

int64_t Notices::who_began_after(int64_t epoch, int64_t agreements) {
  post_receives();
  comm_.make_progress();
  for (int64_t peer = 0; peer < comm_.world(); ++peer) {
    if (peer == comm_.rank() || epoch_of(received_[peer]) <= epoch) continue;
    if (agreements_of(received_[peer]) < agreements) return peer;
  }
  return -1;
}

void Notices::post_receives() {
  if (!received_.empty()) return;
  received_.resize(comm_.world());
  for (int64_t peer = 0; peer < comm_.world(); ++peer) {
    if (peer != comm_.rank()) post_receive(peer);
  }
}

void Notices::post_receive(int64_t peer) {
  received_[peer] = notice(kNothing, kNothing);
  comm_.receive(received_[peer], peer, kNoticeTag, receiving_);
}

}  // namespace zero_ext
