#include "lccl_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>

namespace lagged {
namespace {

using at::Tensor;
using std::chrono::milliseconds;

constexpr std::array kNames{"allreduce",      "reduce",  "broadcast", "allgather", "gather",
                            "reduce_scatter", "scatter", "alltoall",  "barrier"};

Tensor bytes_tensor(int64_t bytes) { return at::empty({bytes}, at::kByte); }
Tensor numbers_tensor(int64_t count) { return at::empty({count}, at::kLong); }

// What a rank says of its collective before it sends anything: a row of numbers.
struct Header {
  static constexpr int64_t kFixed = 4;
  static int64_t length(int64_t world) { return kFixed + 2 * world; }

  const int64_t* row;
  int64_t world;

  int64_t sent_to(int64_t rank) const { return row[kFixed + rank]; }
  int64_t received_from(int64_t rank) const { return row[kFixed + world + rank]; }
  bool agrees_with(const Header& other) const {
    return std::memcmp(row, other.row, kFixed * sizeof(int64_t)) == 0;
  }

  static Tensor of(const Collective& collective) {
    const auto world = static_cast<int64_t>(collective.sends.size());
    Tensor row = numbers_tensor(length(world));
    auto* number = row.data_ptr<int64_t>();
    const Agreement& agreement = collective.agreement;
    *number++ = static_cast<int64_t>(agreement.kind);
    *number++ = static_cast<int64_t>(agreement.dtype);
    *number++ = static_cast<int64_t>(agreement.op);
    *number++ = agreement.root;
    for (const Piece& piece : collective.sends) *number++ = piece.bytes;
    for (const int64_t bytes : collective.received_bytes) *number++ = bytes;
    return row;
  }

  std::string describe() const {
    std::ostringstream text;
    text << kNames.at(row[0]) << " of " << c10::toString(static_cast<c10::ScalarType>(row[1]));
    if (row[2] != c10d::ReduceOp::UNUSED) text << ", op " << row[2];
    if (row[3] >= 0) text << ", root " << row[3];
    text << ", sends [";
    for (int64_t rank = 0; rank < world; ++rank) text << (rank > 0 ? ", " : "") << sent_to(rank);
    text << "] bytes, receives [";
    for (int64_t rank = 0; rank < world; ++rank) {
      text << (rank > 0 ? ", " : "") << received_from(rank);
    }
    text << "]";
    return text.str();
  }
};

void check_agreement(const std::vector<Header>& headers) {
  bool agree = true;
  for (size_t a = 0; a < headers.size(); ++a) {
    agree = agree && headers[a].agrees_with(headers[0]);
    for (size_t b = 0; b < headers.size(); ++b) {
      agree = agree && headers[a].sent_to(static_cast<int64_t>(b)) ==
                           headers[b].received_from(static_cast<int64_t>(a));
    }
  }
  if (agree) return;
  std::string all;
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    all += "\n  rank " + std::to_string(rank) + ": " + headers[rank].describe();
  }
  TORCH_CHECK(false, "the ranks disagree:", all);
}

constexpr std::chrono::microseconds kLongestPause{1000};

void wait_for(const c10::intrusive_ptr<c10d::Work>& work, const std::atomic<bool>& cut) {
  for (std::chrono::microseconds pause{20}; !work->isCompleted();) {
    if (cut) throw Aborted();
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  work->wait();  // raises its error
}

}  // namespace

const char* name_of(Agreement::Kind kind) { return kNames.at(static_cast<size_t>(kind)); }

void Collective::run(c10d::Backend& wire, milliseconds timeout,
                     const std::atomic<bool>& cut) const {
  const auto world = static_cast<int64_t>(sends.size());
  Tensor own = Header::of(*this);
  Tensor table = numbers_tensor(world * Header::length(world));
  c10d::AllgatherOptions gather_options;
  gather_options.timeout = timeout;
  wait_for(wire._allgather_base(table, own, gather_options), cut);
  std::vector<Header> headers;
  for (int64_t rank = 0; rank < world; ++rank) {
    headers.push_back({table.data_ptr<int64_t>() + rank * Header::length(world), world});
  }
  check_agreement(headers);

  std::vector<int64_t> sent_bytes;
  int64_t sent = 0;
  int64_t received = 0;
  for (int64_t rank = 0; rank < world; ++rank) {
    sent_bytes.push_back(sends[rank].bytes);
    sent += sends[rank].bytes;
    received += received_bytes[rank];
  }
  Tensor outgoing = bytes_tensor(sent);
  Tensor incoming = bytes_tensor(received);
  char* at = static_cast<char*>(outgoing.data_ptr());
  for (const Piece& piece : sends) {
    if (piece.bytes > 0) std::memcpy(at, piece.data, piece.bytes);
    at += piece.bytes;
  }
  c10d::AllToAllOptions options;
  options.timeout = timeout;
  std::vector<int64_t> incoming_splits = received_bytes;
  wait_for(wire.alltoall_base(incoming, outgoing, incoming_splits, sent_bytes, options), cut);

  std::vector<const char*> parts;
  const char* part = static_cast<const char*>(incoming.data_ptr());
  for (const int64_t bytes : received_bytes) {
    parts.push_back(part);
    part += bytes;
  }
  deliver(parts);
}

// Sender and receiver first tell each other how many bytes they mean.
void run_messages(const std::vector<Message>& messages, c10d::Backend& wire, milliseconds timeout) {
  enum Tag { from_sender, from_receiver, content };
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  const auto wait_all = [&](Works& works) {
    for (auto& work : works) work->wait(timeout);
    works.clear();
  };
  Works works;
  std::vector<std::vector<Tensor>> own;  // what is sent must live as long as the work
  std::vector<std::vector<Tensor>> theirs;
  for (const Message& message : messages) {
    theirs.push_back({numbers_tensor(1)});
    works.push_back(
        wire.recv(theirs.back(), message.peer, message.sending ? from_receiver : from_sender));
    own.push_back({numbers_tensor(1)});
    *own.back()[0].data_ptr<int64_t>() = message.piece.bytes;
    works.push_back(
        wire.send(own.back(), message.peer, message.sending ? from_sender : from_receiver));
  }
  wait_all(works);
  for (size_t i = 0; i < messages.size(); ++i) {
    const int64_t bytes = *theirs[i][0].data_ptr<int64_t>();
    TORCH_CHECK(bytes == messages[i].piece.bytes, "the ranks disagree: this one ",
                messages[i].sending ? "sends " : "receives ", messages[i].piece.bytes,
                " bytes, rank ", messages[i].peer, messages[i].sending ? " receives " : " sends ",
                bytes);
  }
  for (const Message& message : messages) {
    if (message.piece.bytes == 0) continue;
    std::vector<Tensor> tensors{
        at::from_blob(message.piece.data, {message.piece.bytes}, at::kByte)};
    works.push_back(message.sending ? wire.send(tensors, message.peer, content)
                                    : wire.recv(tensors, message.peer, content));
    own.push_back(tensors);
  }
  wait_all(works);
}

}  // namespace lagged
