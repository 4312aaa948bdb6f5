#include "comm/host_routes.h"

#include <iterator>
#include <utility>

namespace zero_ext {

HostRoutes::HostRoutes(std::vector<int64_t> hosts) : hosts_(std::move(hosts)) {
  for (int64_t rank = 0; rank < std::ssize(hosts_); ++rank) {
    std::vector<int64_t>& here = ranks_[hosts_[rank]];
    places_.push_back(std::ssize(here));
    here.push_back(rank);
  }
}

int64_t HostRoutes::source(int64_t from, int64_t to) const {
  if (share_host(from, to)) return from;
  const std::vector<int64_t>& there = ranks_.at(hosts_[to]);
  const int64_t first = there[places_[from] % std::ssize(there)];
  return first == to ? from : first;
}

}  // namespace zero_ext
