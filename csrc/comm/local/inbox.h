// Inbox: the messages that one peer has announced and this rank has not received.
//
// Owner:   a LocalPeer.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>

#include "comm/local/ring.h"

namespace zero_ext {

class Inbox {
 public:
  // Record::sent or Record::posted.
  void add(const Record& record) {
    if (record.kind == Record::posted) {
      posted_.insert_or_assign(record.tag, record);
    } else {
      sent_[record.tag].push_back(record);
    }
  }

  // The sender of a sent message has withdrawn it. It may have been received already.
  void drop(uint64_t tag, uint64_t number) {
    const auto sent = sent_.find(tag);
    if (sent == sent_.end()) return;
    std::erase_if(sent->second, [&](const Record& record) { return record.number == number; });
    if (sent->second.empty()) sent_.erase(sent);
  }

  // How many sent ones there are.
  int64_t count() const {
    int64_t count = 0;
    for (const auto& [tag, records] : sent_) count += static_cast<int64_t>(records.size());
    return count;
  }

  // The newest posted message of this tag, which stays, else the oldest sent one, which goes.
  std::optional<Record> take(uint64_t tag) {
    if (const auto posted = posted_.find(tag); posted != posted_.end()) return posted->second;
    const auto sent = sent_.find(tag);
    if (sent == sent_.end()) return std::nullopt;
    const Record record = sent->second.front();
    sent->second.pop_front();
    if (sent->second.empty()) sent_.erase(sent);
    return record;
  }

 private:
  std::unordered_map<uint64_t, std::deque<Record>> sent_;  // by tag; no empty ones
  std::unordered_map<uint64_t, Record> posted_;            // by tag
};

}  // namespace zero_ext
