// Unit: the parameters that are reduced, stepped and gathered together. Owns their flat buffers and
// performs the verbs.
//
// Owner:     Engine, which says when each verb runs.
// Threads:   called only under Engine::mutex_.
// Invariant: full, master, grad and every optimizer state share one Layout. fresh(i) says that this
// rank's part of the
//            reduced gradient of slot i holds no sum; it is the same on every rank between two
//            backwards.
//
// Note [Where a gradient goes]
//   direct  one rank: straight into the reduced sum, scaled.
//   bucket  several ranks, a backward that reduces and follows no local one: into the bucket, in
//   the gradient's dtype. local   several ranks, inside no_sync() or after it: into this rank's own
//   fp32 sum of the whole unit, which a reducing
//           backward then sends instead of a bucket.
// Every rank takes the same way in the same backward: it depends on the order of calls alone, never
// on which gradients arrived.
//
// Note [Undoing]
// A backward that throws must leave the sums as they were. A sum that held nothing is marked fresh
// again. Before a reduced sum that holds something is added to, it is copied (before_: 4 bytes per
// element of one range, only where several backwards accumulate). Copies of local sums would double
// what they take: instead, gradients of a slot that has one are held as they came, until the
// backward ends, or, where it reduces, until the unit's message is made of both. The reduced sum
// then takes the place of this rank's range of the local one (local_before_).
//
// Note [Released parameters]
// Where full comes and goes, this rank's range of the parameters stays, in shard. A master that has
// all its bits makes that superfluous, on a device, which must copy the range in any case: a gather
// casts the master, and what the user has written to the parameters goes into the master when they
// are released. Then one rank alone releases, too, and holds no more than the masters. Such a unit
// has a shard while somebody needs one: views of it were lent, or the master is offloaded and the
// parameters are not. On the host a shard costs 2 bytes per element, and saves other ranks from
// reading 4.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bucket.h"
#include "comm.h"
#include "device_flags.h"
#include "flat_buffer.h"
#include "kernels/kernels.h"
#include "launch.h"
#include "layout.h"
#include "policy.h"
#include "stream.h"

namespace zero_ext {

enum class Sink { direct, bucket, local };

enum class Reduction {
  exchange,    // all-to-all, then one fp32 sum in rank order: exact, reproducible
  collective,  // the backend's reduce-scatter in reduce_dtype
};

constexpr int64_t kMaxUnits = 1 << 12;  // of one engine, as far as message tags can tell

// What all units of an engine share.
//
// Note [Offload]
// With an offload policy, what an update needs lies in pinned host memory, and the CPU's kernels
// work on it: masters, sums, optimizer states. A unit's gradients go there as its message does: the
// copy is queued when the unit is complete, and added when it is waited for. Parameters come to the
// host before their update, which must see what the user wrote to them, and go back after it.
struct UnitContext {
  Runner compute{};              // of parameters and gradients
  Runner state{};                // of masters, sums and optimizer states
  bool pinned = true;            // what is offloaded
  SideStream reducing{};         // beside the backward
  SideStream gathering{};        // beside whatever computes
  DeviceFlags* flags = nullptr;  // where compute is a device
  int64_t rank = 0;
  int64_t world = 1;
  Policy policy;
  Reduction reduction = Reduction::exchange;
  at::ScalarType reduce_dtype = at::kFloat;  // of collective reductions
  bool reduce_in_gradient_dtype = true;      // of exchange: else in reduce_dtype
  std::shared_ptr<MemoryCounter> memory;
  std::shared_ptr<SpareMemory> spare;        // of released parameters
  std::shared_ptr<MemoryCounter> offloaded;  // counts what lies on the host for a device
  // Other ranks need this one's part of the parameters.
  bool shards_parameters() const { return policy.release == When::after_use && world > 1; }
  // See Note [Released parameters].
  bool casts_masters(at::ScalarType dtype) const {
    return policy.release == When::after_use && !compute.on_host() && !offloads() &&
           dtype != at::kFloat;
  }
  bool offloads() const { return compute.device() != state.device(); }
  Place compute_place() const { return {.device = compute.device()}; }
  Place state_place() const {
    return {.device = state.device(),
            .pinned_for = offloads() && pinned ? compute.device().type() : c10::kCPU};
  }
  const std::shared_ptr<MemoryCounter>& state_memory() const {
    return offloads() ? offloaded : memory;
  }
};

// A frozen unit has parameters alone: no master, no gradient, no turn in a backward.
enum class UnitKind { trainable, frozen };

// Consecutive elements of this rank's range, gaps included: the parts of slots first_slot …
// last_slot.
struct Run {
  int64_t begin;
  int64_t numel;
  int64_t first_slot;
  int64_t last_slot;
};

class Unit {
 public:
  // `values`: the parameters' present values, in any one floating dtype. `dtype`: what the
  // parameters are computed in.
  // `first_flag`: that of slot 0 among the context's flags.
  Unit(const UnitContext& context, int64_t index, int64_t first_flag, std::string name,
       std::vector<SlotSpec> specs, const std::vector<at::Tensor>& values, at::ScalarType dtype,
       UnitKind kind, Comm& comm, bool broadcast);

  const std::string& name() const { return name_; }
  const Layout& layout() const { return layout_; }
  at::ScalarType dtype() const { return dtype_; }
  // What its gradients arrive in, and travel in by exchange; at first dtype(). Before any backward.
  void set_gradient_dtype(at::ScalarType dtype) { gradient_dtype_ = dtype; }

  // Slot i in its parameter's shape, over full.
  at::Tensor parameter_view(int64_t i) const;
  // This rank's part of slot i, 1-D, over the reduced gradient or the master.
  at::Tensor grad_slice(int64_t i) const;
  at::Tensor master_slice(int64_t i) const;
  // The same of what comes and goes, in its shard.
  at::Tensor parameter_slice(int64_t i);
  // The same of whole `values` in the parameter's shape, copied.
  at::Tensor own_part(int64_t i, const at::Tensor& values, at::ScalarType dtype) const;
  // What the parameter itself holds of this rank's part now: of full, or of shard while released.
  at::Tensor present_slice(int64_t i) const;
  // A copy of master, with the values that were written to the parameter since.
  at::Tensor master_with(int64_t i, const at::Tensor& written) const;
  const FlatBuffer& master() const { return master_; }
  float* master_data() const;
  float* grad_data() const { return static_cast<float*>(grad_.data()); }
  at::Tensor grad_range(const Run& run) const { return grad_.slice(run.begin, run.numel); }
  // This rank's range of the parameters in their compute dtype, where an update must write it; null
  // where master is all that there is.
  void* stepped_parameter() const;
  // Whether full does.
  bool comes_and_goes() const { return comes_and_goes_; }
  bool holds_storage_of(const at::Tensor& tensor) const;
  int64_t own_range() const { return layout_.ranges() == 1 ? 0 : context_.rank; }
  const Piece* own_piece(int64_t i) const { return own_pieces_[i]; }

  // One backward. `expected[i]`: autograd will reach slot i.
  void begin_backward(Sink sink, bool reduces, const std::vector<uint8_t>& expected);
  // Bucketed gradients need one when they arrive, local sums when they are reduced.
  bool needs_bucket() const { return bucket_ == nullptr && sink_ == Sink::bucket; }
  bool needs_bucket_to_reduce() const { return bucket_ == nullptr && sink_ != Sink::direct; }
  void lend_bucket(std::unique_ptr<Bucket> bucket);
  // A gradient of slot i; undefined: autograd reached the parameter with nothing. Returns false if
  // it holds NaN or Inf. `scale` is for direct and local sums; what a bucket holds is scaled when
  // it is reduced. Of a gradient that is held, nonfinite_arrived() says so later.
  bool accumulate(int64_t i, const at::Tensor& grad, float scale);
  bool complete() const { return missing_ == 0; }
  bool expects_gradients() const { return missing_ > 0; }
  void expect_no_more() { missing_ = 0; }
  bool reduced() const { return reduced_; }
  void start_reduce(Comm& comm, int64_t backward);
  // Waits, adds the ranks' contributions, gives the bucket back (null where there was none).
  std::unique_ptr<Bucket> finish_reduce(float scale);
  void end_backward();
  // Slots whose held gradients held NaN or Inf.
  const std::vector<int64_t>& nonfinite_arrived() const { return nonfinite_arrived_; }
  // What a reduction that nobody will finish still uses.
  struct Orphan {
    Pending pending;
    std::unique_ptr<Bucket> bucket;
    std::vector<at::Tensor> flags;
  };
  // The backward threw: the sums become what they were before it, see Note [Undoing].
  void abort_backward(std::vector<Orphan>& orphans);

  // The reduced gradient.
  bool fresh(int64_t i) const { return fresh_[i] != 0; }
  bool local_fresh(int64_t i) const { return local_fresh_[i] != 0; }
  void clear_gradient(int64_t i);
  void zero_gradient(int64_t i);
  // No slot has a gradient any more: on a device its memory is free for others.
  void drop_idle_sums();
  void write_gradient(int64_t i, const at::Tensor& local);  // local: this rank's part, 1-D
  // The user wrote to slot i: it may hold NaN or Inf that no kernel of ours has seen.
  void suspect_nonfinite(int64_t i) { nonfinite_[i] = 1; }
  // Adds the squares of this rank's part of slot i, in an order that does not matter.
  // `sum` lies where the sums do.
  void add_squares(int64_t i, kernels::SquareSum* sum) const;
  // This rank's part of slot i was suspected to hold NaN or Inf, and does.
  bool still_nonfinite(int64_t i);
  // Its sum of squares into `result`, one fp64 of the sum's device, where that is a device.
  void sum_squares_of(int64_t i, double* result, const at::Tensor& scratch) const;
  bool suspected(int64_t i) const { return nonfinite_[i] != 0; }
  void forget_suspicion(int64_t i) { nonfinite_[i] = 0; }
  int64_t flag(int64_t i) const { return first_flag_ + i; }

  // The user replaced the parameter's storage: its values are taken over into full.
  void adopt_parameter(int64_t i, const at::Tensor& values);
  // Brings master up to date with what was written into full.
  void adopt_writes();

  // Of what an update needs, where such things lie.
  FlatBuffer state_buffer(Held held, at::ScalarType dtype, int64_t numel) const;

  // The used slots of this rank's range, as the longest runs whose neighbours are `same`.
  std::vector<Run> runs(const std::function<bool(int64_t)>& used,
                        const std::function<bool(int64_t, int64_t)>& same) const;

  void gather(Comm& comm, int64_t tag, Pending& pending);

  // Around an update, where states are offloaded: this rank's parameters come to the host, are
  // waited for, go back.
  void begin_update();
  void await_update();
  void end_update();

  // Where full comes and goes, see Note [Released parameters].
  int64_t full_bytes() const { return static_cast<int64_t>(full_.tensor().nbytes()); }
  // This rank's range, for `peer` to take whenever it gathers the unit.
  Comm::Offer offer(Comm& comm, int64_t peer) const;
  void start_gather(Comm& comm);
  void finish_gather(const std::function<std::string()>& what);
  enum class Writes { keep, discard };
  // Frees full; with `keep`, what the user wrote into this rank's range reaches shard or master
  // first.
  void release(Comm& comm, Writes writes);
  // Where parameters travel through host memory: what others take is what this rank holds now.
  void refresh_mirror(const Comm& comm);
  // See FlatBuffer::stow and unstow: of the parameters, the masters, the sums.
  void stow(const std::set<std::string>& states);
  void unstow();
  // Of a unit that is not used any more.
  void drop_master();
  // Into full as it is; what was written there is forgotten. Begins a gather, without allocating.
  void receive_ranges(Comm& comm);

 private:
  struct Batched {
    int64_t slot;
    at::Tensor grad;  // dense, strides as the slot's
    bool first;       // overwrites what the bucket or the sum holds
    float scale;      // of direct sums
  };
  enum Arrival : uint8_t { kNotArrived, kArrivedEmpty, kArrived };

  at::Tensor on_device(int64_t numel, at::ScalarType dtype) const;
  void take_values(const std::vector<at::Tensor>& values, Comm& comm, bool broadcast);
  at::ScalarType message_dtype() const;
  // Of the local sum, which lies with this rank's range first, so that a buffer of one range is the
  // beginning of a buffer of all.
  float* local_sum(const Piece& piece, int64_t in_slot) const;
  // This rank's range of the parameters where it always is: in shard, or in full; null where it is
  // in neither.
  char* own_parameters() const;
  // This rank's part of slot i in a buffer in which its range begins at `range_begin`.
  at::Tensor own_slice(const FlatBuffer& buffer, int64_t i, int64_t range_begin = 0) const;
  void adopt_into_master(const void* parameters, float* master, int64_t numel) const;
  void cast_master(void* parameters) const;
  void need_shard();
  // What was written to it goes into master, if nobody has views of it any more.
  void drop_idle_shard();
  bool contributes(int64_t i) const;
  // On a device the sums have memory from the first gradient on until they are dropped: activations
  // need it meanwhile. On the host its pages would have to be made again for each step.
  bool sums_come_and_go() const { return !context_.state.on_host(); }
  void need_sums();
  // Where the reduced sum is: below the local one, once that lies where it was.
  const FlatBuffer& reduced_sum() const { return sink_ == Sink::local && kept_ ? before_ : grad_; }
  void accumulate_local(int64_t i, const at::Tensor& grad, int32_t* nonfinite);
  void add_held(int64_t i);
  // Into the message: the local sum of slot i, and what arrived in this backward.
  void stage_local(int64_t i);
  void* staged(int64_t offset) const;
  // Gaps of a device's buckets are cleared at once, when the bucket is lent.
  void clear_gap(int64_t i);
  void accumulate_in_bucket(int64_t i, const void* grad, kernels::DType dtype, kernels::Write write,
                            int32_t* nonfinite);
  void keep_reduced_sum();
  void restore_reduced_sum();
  void start_counting(Comm& comm);
  void start_exchange(Comm& comm);
  void exchange_flags(Comm& comm, int64_t tag);
  void start_collective(Comm& comm);
  void clear_absent();
  void wait_for_reduction();
  void bring_counts();
  void check_flags() const;
  bool used_by(int64_t source, int64_t i) const;
  void add_contributions(float scale);
  void uncover_reduced_sum();
  // Contributions that lie on the device, to the host where the sums are offloaded. Queued.
  void send_to_host(Comm& comm);
  // The current stream goes on where the bucket's last gradient was put into it.
  void follow_filling_stream();
  void bring_own_range();
  // On a device gradients wait until their unit is complete, for one launch.
  bool batches() const { return !context_.compute.on_host() && sink_ != Sink::local; }
  void flush_batched();
  using BatchedIterator = std::vector<Batched>::iterator;
  // Equal in dtype, scale and `first`.
  void launch_batch(BatchedIterator begin, BatchedIterator end);
  int32_t* arrival_flag(int64_t i, int32_t* on_host) const {
    return context_.compute.on_host() ? on_host : context_.flags->arrival(flag(i));
  }
  void add_run(const Run& run, float scale);

  const UnitContext& context_;
  int64_t index_;
  int64_t first_flag_;
  std::string name_;
  Layout layout_;
  at::ScalarType dtype_;
  at::ScalarType gradient_dtype_;
  std::vector<const Piece*> own_pieces_;  // [slots], null where this rank holds nothing of a slot
  bool own_gaps_ = false;                 // between them, or after them

  int64_t gather_tag_;
  std::string released_message_;  // what a read raises meanwhile
  std::string dropped_message_;   // the same, of the sums
  bool casts_master_ = false;
  bool comes_and_goes_ = false;
  FlatBuffer full_;     // [padded], compute dtype; without memory while the unit is released
  FlatBuffer shard_;    // [range], compute dtype; undefined where full always holds it, and mostly
                        // where casts_master_
  at::Tensor mirror_;   // of this rank's range, on the host, where it travels through host memory
  FlatBuffer master_;   // [range], fp32; undefined where own_parameters() are fp32 and serve as it
  FlatBuffer updated_;  // [range], compute dtype; own_parameters() on the host, around an update
  std::optional<c10::Event> downloaded_;  // into updated_
  FlatBuffer grad_;  // [range], fp32; [padded] with this rank's range first once local sums exist
  FlatBuffer
      before_;  // [range], fp32; the reduced sum before this backward, or below the local sums
  bool kept_ = false;        // before_ holds it
  FlatBuffer local_before_;  // [range], fp32; what the reduced sum of this backward replaced

  std::vector<uint8_t> fresh_;        // [slots]
  std::vector<uint8_t> local_fresh_;  // [slots], of the local sums
  std::vector<uint8_t> nonfinite_;    // [slots], of this rank's part: seen once, or suspected

  // One backward.
  Sink sink_ = Sink::direct;
  bool reduces_ = false;
  float scale_ = 1;                            // of gradients that are added to a local sum
  std::vector<std::vector<at::Tensor>> held_;  // [slots]; dense, strides as the slot's
  std::vector<Batched> batched_;               // at most one of each slot
  std::vector<int64_t> nonfinite_arrived_;
  int64_t backward_ = 0;
  int64_t missing_ = 0;
  bool reduced_ = false;  // started
  bool added_ = false;    // finished
  std::vector<uint8_t> expected_;
  std::vector<uint8_t> arrived_;  // [slots] of Arrival
  std::vector<uint8_t> fresh_before_;
  std::vector<uint8_t> local_fresh_before_;
  std::unique_ptr<Bucket> bucket_;
  at::Tensor staged_;  // [padded], the bucket's gradients
  Pending pending_;
  Pending gathering_;
  std::optional<c10::Stream> filled_on_;  // the stream of the bucket's last gradient
  std::vector<at::Tensor> flags_;  // [world] messages of bytes, or one int32 [slots] of counts
  bool flags_are_counts_ = false;
  std::vector<at::Tensor> sources_;  // contributions to this rank's range, in rank order
  std::optional<c10::Event> sent_to_host_;
};

}  // namespace zero_ext
