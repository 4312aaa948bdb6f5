#include "comm/pending.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "comm/current_call.h"
#include "comm/host_wait.h"
#include "comm/interruptible_wait.h"
#include "comm/local/shared_host_transport.h"
#include "comm/process_groups.h"
#include "core/errors.h"
#include "core/interrupts.h"
#include "core/range.h"

namespace zero_ext {

namespace {

void withdraw(Pending::Part& part) noexcept {
  if (part.message != nullptr) SharedHostTransport::withdraw(*part.message);
  part.message.reset();  // before the memory that it may still point to
}

// `what`: as in Pending::wait.
[[noreturn]] void raise_failure(const std::string& what, const Pending::Part& part,
                                const std::string& cause) {
  const std::string peer = part.awaited                      ? part.awaited()
                           : part.peer == Pending::kAllRanks ? "the other ranks"
                                                             : "rank " + std::to_string(part.peer);
  const bool timed_out = cause.find("imed out") != std::string::npos;
  std::string remedy = current_call().ends_with("()")
                           ? "Every rank must call " + current_call()
                           : "Every rank must run the same backwards and steps";
  for (const char* closed : {"by peer", "roken pipe", "pair closure"}) {
    if (cause.find(closed) == std::string::npos) continue;
    remedy = "This connection is closed for good, as after a timeout: start all ranks again";
  }
  TORCH_CHECK(false, what, part.sending ? " (sending to " : " (waiting for ", peer, "): ", cause,
              "\n", remedy, "; look for the first error in the logs of the other ranks.",
              timed_out ? " The timeout is that of the process group, or ZERO_EXT_TIMEOUT_S." : "");
}

}  // namespace

Pending::Pending() = default;
Pending::~Pending() = default;
Pending::Pending(Pending&& other) noexcept = default;
Pending& Pending::operator=(Pending&& other) noexcept = default;

void Pending::add(Part part, const std::shared_ptr<CollectiveWatch>& watch,
                  const std::shared_ptr<WaitedTimes>& waited) {
  parts_.push_back(std::move(part));
  watch_ = watch;
  waited_ = waited;
  if (watch != nullptr && !begun_.has_value()) begun_ = watch->begin();
}

void Pending::wait(const std::function<std::string()>& what, const Meanwhile& meanwhile) {
  std::exception_ptr others;  // an error of `meanwhile`
  Meanwhile guarded;
  if (meanwhile) {
    guarded = [&] {
      try {
        return meanwhile();
      } catch (...) {
        others = std::current_exception();
        throw;
      }
    };
  }
  // From the back. What others of this host wait for comes first, or two ranks would wait for each
  // other. Then receives: their errors name the rank that failed. After an error nobody waits for the
  // remaining parts, and their tensors live until this object dies.
  std::ranges::stable_sort(parts_, {}, [](const Part& part) {
    return part.sending ? 0 : part.relay ? 2 : 1;
  });
  while (!parts_.empty() || !sent_on_.empty()) {
    if (parts_.empty()) parts_.swap(sent_on_);
    Part& part = parts_.back();
    const auto whom = [&] {
      return part.peer == kAllRanks ? "for all ranks" : "for rank " + std::to_string(part.peer);
    };
    const Range range("wait", whom);
    const auto begin = std::chrono::steady_clock::now();
    try {
      const bool in_slices = watch_ == nullptr && part.peer == kAllRanks;
      const auto wait_for = [&](const Message& message) {
        if (in_slices) {
          wait_interruptibly(message, guarded);
        } else if (!SharedHostTransport::wait(*message, guarded)) {
          message->wait();
        }
      };
      if (part.message != nullptr) wait_for(part.message);
      if (part.across != nullptr) wait_for(part.across->sum_over_replicas(part.tensor));
      if (part.target.defined()) part.target.copy_(part.tensor);
      if (part.relay) {
        Pending sends;
        part.relay(part.tensor, sends);
        std::ranges::move(sends.parts_, std::back_inserter(sent_on_));
      }
    } catch (const std::exception& error) {
      if (others != nullptr || is_interrupt(error)) throw;
      raise_if_ranks_wait(part.tensor.device(), watch_.get());
      raise_failure(what(), part, text_of(error));
    }
    if (watch_ == nullptr) (*waited_)[part.peer] += std::chrono::steady_clock::now() - begin;
    parts_.pop_back();
  }
  if (watch_ == nullptr) return;
  std::exchange(watch_, nullptr)->add(what(), std::exchange(begun_, std::nullopt));
}

void Pending::abandon() noexcept {
  for (std::vector<Part>* parts : {&parts_, &sent_on_}) {
    for (Part& part : *parts) withdraw(part);
    parts->clear();
  }
}

void Pending::abandon(int64_t peer) noexcept {
  std::erase_if(parts_, [&](Part& part) {
    if (part.peer != peer) return false;
    withdraw(part);
    return true;
  });
}

void Pending::append(Pending&& other) {
  std::move(other.parts_.begin(), other.parts_.end(), std::back_inserter(parts_));
  other.parts_.clear();
  if (other.waited_ != nullptr) waited_ = other.waited_;
  if (other.watch_ == nullptr) return;
  watch_ = std::move(other.watch_);
  if (!begun_.has_value()) begun_ = std::move(other.begun_);
}

void Pending::wait_if_possible() noexcept {
  for (const Part& part : parts_) {
    try {
      if (part.message != nullptr) part.message->wait();
    } catch (const std::exception&) {
      // This peer's process has ended; other peers may still be there.
    }
  }
  parts_.clear();
}

}  // namespace zero_ext
