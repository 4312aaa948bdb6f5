// SharedHostTransport: what its peers do.
#include <c10/util/StringUtil.h>

#include <map>
#include <set>
#include <string>

#include "comm/local/shared_host_transport.h"

namespace zero_ext {
namespace {

std::string described(const std::string& call) {
  return call.empty() ? "no call of zero_ext" : call;
}

}  // namespace

std::string SharedHostTransport::call_of(int64_t peer) const {
  return described(peers_[peer].board().call.read());
}

std::string SharedHostTransport::calls_of_peers() {
  std::map<int64_t, std::string> calls;  // by rank
  for_each_peer([&](int64_t rank, const LocalPeer& peer) {
    // A transport that the peer has closed shows none; another one may show the call.
    if (calls[rank].empty()) calls[rank] = peer.board().call.read();
  });
  std::string text;
  for (const auto& [rank, call] : calls)
    text += c10::str(text.empty() ? "" : ", ", "rank ", rank, " is in ", described(call));
  return text;
}

std::string SharedHostTransport::dead_peers() {
  std::set<int64_t> dead;
  for_each_peer([&](int64_t rank, const LocalPeer& peer) {
    if (peer.has_died()) dead.insert(rank);
  });
  return dead.empty() ? "" : " The process of rank " + c10::Join(", ", dead) + " has ended.";
}

}  // namespace zero_ext
