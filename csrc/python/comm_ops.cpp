// The bucketed reduce-scatter as a stateless op: what a unit does with its bucket, for code with
// buckets and sums of its own. The fake implementation is in zero_ext/ops.py.
#include <memory>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "core/errors.h"
#include "memory/flat_buffer.h"
#include "python/op_call.h"

namespace zero_ext {
namespace {

using at::Tensor;

// Far from the tags that users choose for their own messages on the same group. All calls share it:
// messages between two ranks with one tag arrive in the order in which they were sent.
constexpr int64_t kTag = 0x10000000;

// The tag contains the size, so that messages of ranks with different sizes never meet, and their
// calls time out. gloo would end a process that receives more than it asked for.
int64_t tag_of(const Tensor& part) { return kTag + static_cast<int64_t>(part.nbytes()); }

// acc[i] = (fresh ? 0 : acc[i]) + scale * bucket₀[i] + scale * bucket₁[i] + …, where bucketᵣ is the
// part of rank r's bucket that belongs to this rank: rank order, fp32, one rounding per rank. `acc`
// is written only after every rank's part has arrived.
kernels::Status reduce_scatter_accumulate_(const OpCall& call) {
  enum : size_t { kBucket, kAcc, kGroupName, kScale, kFresh };
  const c10::Device device = call.device();
  const Tensor& bucket = call.value(kBucket);
  const Tensor& acc = call.floats(kAcc);
  check_apart(call.name(kBucket), bucket, call.name(kAcc), acc);
  const std::string& group_name = call.text(kGroupName);
  Comm comm =
      group_name.empty() ? Comm() : Comm({.reduce = group_name, .gather = group_name}, device);
  const int64_t world = comm.world();
  const int64_t rank = comm.rank();
  const int64_t numel = acc.numel();
  // The group's name does not tell this rank's number among all ranks.
  const auto where_in_group = [&] {
    if (group_name.empty()) return where(rank);
    return c10::str("zero_ext [rank ", rank, " of process group '", group_name, "']: ");
  };
  TORCH_CHECK(bucket.numel() == world * numel, where_in_group(), "'bucket' has ", bucket.numel(),
              " elements, 'acc' has ", numel, " on each of ", world, " ranks: it must have ",
              world * numel, ". Pad the bucket to a multiple of the number of ranks.");

  const Tensor flat = bucket.view({-1});
  // In huge pages: touching fresh small ones would take as long as the messages.
  const FlatBuffer memory(std::make_shared<MemoryCounter>(), Held::bucket, {.device = device},
                          bucket.scalar_type(), (world - 1) * numel);
  const Tensor& received = memory.tensor();
  std::vector<Tensor> sends(world);
  std::vector<Tensor> parts(world);
  for (int64_t peer = 0, next = 0; peer < world; ++peer) {
    sends[peer] = flat.narrow(0, peer * numel, numel);
    parts[peer] = peer == rank ? sends[peer] : received.narrow(0, next++ * numel, numel);
  }
  if (numel == 0) return kernels::Status::ok;
  Pending pending;
  comm.exchange(sends, parts, kNoEpoch, tag_of(sends[rank]), pending);
  pending.wait([&] {
    return where_in_group() + "reduce_scatter_accumulate_ of " + std::to_string(numel) +
           " elements per rank";
  });

  std::vector<const void*> sources;
  for (const Tensor& part : parts) sources.push_back(part.const_data_ptr());
  return call.kernels().accumulate_ranks(
      sources.data(), static_cast<int32_t>(world), dtype_of(bucket.scalar_type()),
      acc.mutable_data_ptr<float>(), numel, static_cast<float>(call.number(kScale)),
      call.flag(kFresh), /*nonfinite=*/nullptr, call.launch());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zero_ext, m) {
  m.def(
      "reduce_scatter_accumulate_(Tensor bucket, Tensor(a!) acc, str group_name, float scale, bool "
      "fresh) -> ()");
}

TORCH_LIBRARY_IMPL(zero_ext, CPU, m) {
  implement<reduce_scatter_accumulate_>(m, "reduce_scatter_accumulate_");
}
#if defined(ZERO_EXT_CUDA)
TORCH_LIBRARY_IMPL(zero_ext, CUDA, m) {
  implement<reduce_scatter_accumulate_>(m, "reduce_scatter_accumulate_");
}
#endif

}  // namespace zero_ext
