// StalledRanks: what each rank of a group waits for, known to all of them once none goes on.
//
// Owner:   CollectiveWatch.
// Threads: its thread alone. Calls go through the group's store and may wait for its server.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace zero_ext {

// "2, 3", or of more ranks than one reads: "0, 1, 2, 3 and 60 more".
std::string list_of_ranks(const std::vector<int64_t>& ranks);

class StalledRanks {
 public:
  // `global_rank`: of a rank of the group, as error messages call it.
  StalledRanks(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t world,
               std::function<int64_t(int64_t)> global_rank);
  ~StalledRanks();
  StalledRanks(const StalledRanks&) = delete;
  StalledRanks& operator=(const StalledRanks&) = delete;

  // Tells the other ranks that this one waits for `what`; empty: that it goes on. Returns the same
  // text on every rank: who waits for what. Empty until all ranks wait, and know that all do. Empty
  // also where all wait for the same: then a message is slow.
  std::string exchange(const std::string& what);

 private:
  void publish(const std::string& value);
  // Of all ranks; empty where one has published nothing.
  std::vector<std::string> published();
  std::string described(const std::vector<std::string>& values) const;

  c10::intrusive_ptr<c10d::Store> store_;  // null after an error
  bool is_own_ = false;                    // a connection of its own
  const int64_t rank_;
  const std::function<int64_t(int64_t)> global_rank_;
  std::vector<std::string> keys_;
  std::string value_;  // what this rank has published
  std::string found_;  // what exchange() returns when all ranks know it
};

}  // namespace zero_ext
