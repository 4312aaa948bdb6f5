// HostRoutes: which way a rank's part takes to the other ranks of a replica in a gather.
//
// Owner:   Peers.
// Threads: constant.
//
// Note [Gathers by host]
// The k ranks of a host share its network card. So a part goes once to each other host, to one rank
// there, which sends it on to the ranks that read its memory. Sent to each rank, it would go k times.
// - The parts of a host go to different ranks of another one, as far as that has as many.
// - A rank sends on what it waits for, in Pending::wait. So all ranks must wait for such a gather:
//   those after an update do. The gathers of stage 3 are one-sided, and their parts go to each rank.
// - Hosts are what ranks can really do: ranks of one host read each other's memory, all of them.
//   Where that is not so for some pair, each rank is a host of its own.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace zero_ext {

class HostRoutes {
 public:
  HostRoutes() = default;
  // `hosts`: of each rank of a replica; ranks of one host have the same number.
  explicit HostRoutes(std::vector<int64_t> hosts);

  bool share_host(int64_t a, int64_t b) const { return hosts_[a] == hosts_[b]; }
  bool cross_hosts() const { return ranks_.size() > 1; }
  // From which rank `to` gets the part of `from`: from that one, or from a rank of its own host.
  int64_t source(int64_t from, int64_t to) const;

 private:
  std::vector<int64_t> hosts_;
  std::vector<int64_t> places_;                              // of each rank among those of its host
  std::unordered_map<int64_t, std::vector<int64_t>> ranks_;  // of each host
};

}  // namespace zero_ext
