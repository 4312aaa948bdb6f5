#include "comm/peer_memory.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>

#include "comm/rendezvous.h"

namespace zero_ext {
namespace {

namespace symmetric = c10d::symmetric_memory;

constexpr int64_t kLine = 256;  // bytes: of slots, each begins one
constexpr int64_t kWord = sizeof(uint32_t);

int64_t lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

// The current stream waits for the other ranks' words.
class PeerMemory::Arrival final : public c10d::Work {
 public:
  Arrival(std::shared_ptr<PeerMemory> memory, int64_t slot, uint32_t tag)
      : memory_(std::move(memory)), slot_(slot), tag_(tag) {}
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    memory_->await(kFilled, slot_, tag_);
    return true;
  }

 private:
  const std::shared_ptr<PeerMemory> memory_;
  const int64_t slot_;
  const uint32_t tag_;
};

PeerMemory::PeerMemory(Ranks ranks, const c10::intrusive_ptr<c10d::Store>& store,
                       std::chrono::milliseconds timeout)
    : ranks_(ranks),
      store_(store),
      table_(ranks_.device),
      timeout_(timeout),
      failed_(at::zeros({1}, at::TensorOptions().dtype(at::kInt).pinned_memory(true))) {
  arena_ = map(slot_begin(0));
}

bool PeerMemory::is_known_on(c10::Device device) { return symmetric::has_allocator(device.type()); }

// Layout of an arena

int64_t PeerMemory::words_begin(Word word, int64_t slot) const {
  return (word * kNumbers + slot) * ranks_.world * kWord;
}

uint32_t* PeerMemory::number_of(int64_t slot) const {
  return reinterpret_cast<uint32_t*>(own(words_begin(kRead, kNumbers) + slot * kWord));
}

int64_t PeerMemory::slot_begin(int64_t slot) const {
  return lines(words_begin(kRead, kNumbers) + kNumbers * kWord) + slot * slot_bytes_;
}

char* PeerMemory::own(int64_t byte) const { return arena_.of_ranks[ranks_.rank] + byte; }

PeerMemory::Arena PeerMemory::map(int64_t bytes) {
  const Rendezvous ranks(ranks_.rank, ranks_.world, store_,
                         "zero_ext/devices/" + std::to_string(maps_++), timeout_);
  Arena arena;
  arena.own = symmetric::empty_strided_p2p({bytes}, {1}, at::kByte, ranks_.device, ranks.name(),
                                           std::nullopt);
  arena.own.narrow(0, 0, std::min(bytes, slot_begin(0))).zero_();
  current_stream(ranks_.device).synchronize();  // before a rank that has come writes to it
  const auto mapped = symmetric::rendezvous(arena.own, ranks.name());
  TORCH_CHECK(mapped != nullptr && mapped->world_within_direct_access(),
              "a rank's device cannot read the memory of another one's");
  arena.mapped = std::make_shared<decltype(mapped)>(mapped);
  for (void* of_rank : mapped->get_buffer_ptrs())
    arena.of_ranks.push_back(static_cast<char*>(of_rank) + mapped->get_offset());
  return arena;
}

void PeerMemory::reserve(int64_t bytes, const std::shared_ptr<MemoryCounter>& counter) {
  if (lines(bytes) <= slot_bytes_) return;
  current_stream(ranks_.device).synchronize();  // the old slots are read until then
  arena_ = {};
  counted_.reset();
  slot_bytes_ = lines(bytes);
  const int64_t total = slot_begin(kSlots);
  counter->add(Held::bucket, total);
  counted_ = std::shared_ptr<void>(
      nullptr, [counter, total](void*) { counter->subtract(Held::bucket, total); });
  arena_ = map(total);
  next_ = 0;
}

// Slots

at::Tensor PeerMemory::next(at::ScalarType dtype, int64_t numel) {
  if (left_[next_].has_value()) left_[next_]->block(current_stream(ranks_.device));
  await(kRead, next_, 0);
  return part(next_, ranks_.rank, dtype, 0, numel);
}

PeerMemory::Filled PeerMemory::show_filled(at::ScalarType dtype) {
  const int64_t slot = std::exchange(next_, (next_ + 1) % kSlots);
  const auto tag = static_cast<uint32_t>(dtype_of(dtype));
  show(kFilled, slot, /*next=*/true, tag);
  return {slot, c10::make_intrusive<Arrival>(shared_from_this(), slot, tag)};
}

at::Tensor PeerMemory::part(int64_t slot, int64_t rank, at::ScalarType dtype, int64_t begin,
                            int64_t numel) const {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  const auto options = at::TensorOptions().dtype(dtype).device(ranks_.device);
  char* const data = arena_.of_ranks[rank] + slot_begin(slot) + begin * itemsize;
  return at::for_blob(data, {numel}).options(options).target_device(ranks_.device).make_tensor();
}

void PeerMemory::show_read(int64_t slot) {
  show(kRead, slot, /*next=*/false, 0);
  left_[slot].emplace(current_stream(ranks_.device));
}

// Kept memory

c10::DataPtr PeerMemory::keep(int64_t tag, int64_t bytes) {
  auto arena = std::make_unique<std::shared_ptr<const Arena>>(
      std::make_shared<const Arena>(map(std::max(bytes, kLine))));
  kept_[tag] = *arena;
  void* const data = (*arena)->of_ranks[ranks_.rank];
  return {data, arena.release(),
          [](void* context) { delete static_cast<std::shared_ptr<const Arena>*>(context); },
          ranks_.device};
}

void PeerMemory::read_kept(const at::Tensor& into, int64_t rank, int64_t tag,
                           int64_t offset) const {
  const std::shared_ptr<const Arena> arena = kept_.at(tag).lock();
  copy_bytes(into.mutable_data_ptr(), ranks_.device, arena->of_ranks[rank] + offset, ranks_.device,
             into.nbytes());
}

void PeerMemory::meet() {
  show(kFilled, kMeetings, /*next=*/true, 0);
  await(kFilled, kMeetings, 0);
}

// Words

void PeerMemory::show(Word word, int64_t slot, bool next, uint32_t tag) {
  std::array<uint32_t*, kernels::kMostWords> words{};
  for (int64_t peer = 0; peer < ranks_.world; ++peer) {
    char* const theirs = arena_.of_ranks[peer] + words_begin(word, slot);
    words[peer] = reinterpret_cast<uint32_t*>(theirs) + ranks_.rank;
  }
  check(table_->show_words(words.data(), static_cast<int32_t>(ranks_.world), number_of(slot), next,
                           tag, table_.launch()),
        "show_words");
}

void PeerMemory::await(Word word, int64_t slot, uint32_t tag) {
  check(table_->await_words(reinterpret_cast<const uint32_t*>(own(words_begin(word, slot))),
                            static_cast<int32_t>(ranks_.world), number_of(slot), tag,
                            std::chrono::nanoseconds(timeout_).count(),
                            failed_.mutable_data_ptr<int32_t>(), table_.launch()),
        "await_words");
}

void PeerMemory::stop() {
  auto* failed = static_cast<volatile int32_t*>(failed_.mutable_data_ptr<int32_t>());
  if (*failed == 0) *failed = kernels::late_word(static_cast<int32_t>(ranks_.rank));
}

PeerMemory::Failure PeerMemory::failure() const {
  const int32_t failed = *static_cast<const volatile int32_t*>(failed_.const_data_ptr<int32_t>());
  if (failed == 0) return {};
  return {.rank = (failed - 1) / 2, .other_dtype = failed % 2 == 0};
}

}  // namespace zero_ext
