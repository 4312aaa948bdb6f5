// Rendezvous: the ranks that map each other's memory, as torch knows them meanwhile.
//
// Owner:   PeerMemory, for the length of a call.
// Threads: as PeerMemory. Every rank makes them in one order.
//
// torch finds a process group by its name, and the ranks meet in the group's store. Before torch 2.15
// the keys there are numbered for each process, by all that it has mapped. So ranks that had mapped
// something else before would never meet. Here the ranks count each rendezvous' numbers alike.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace zero_ext {

class Rendezvous {
 public:
  // `key`: of this rendezvous in `store`. A rank waits for the others until `timeout`.
  Rendezvous(int64_t rank, int64_t world, const c10::intrusive_ptr<c10d::Store>& store,
             const std::string& key, std::chrono::milliseconds timeout);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  const std::string& name() const { return name_; }

 private:
  const std::string name_;
  const c10::intrusive_ptr<c10d::ProcessGroup> group_;  // torch does not keep it
};

}  // namespace zero_ext
