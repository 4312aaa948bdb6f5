// Unit: the parameters that are reduced, stepped and gathered together. Owns them, their masters
// and the sums of their gradients, and takes its gradients through one backward.
//
// Owner:     Engine, which says when each verb runs.
// Threads:   called only under Engine::mutex_.
// Invariant: parameters, masters, sums and every optimizer state share one RankLayout.
//
// Note [Where a gradient goes]
//   direct  one rank: straight into the reduced sum, scaled.
//   bucket  several ranks, a backward that reduces and follows no local one: into the bucket, in
//           the gradient's dtype; held as they came until the unit is lent one.
//   local   several ranks, inside no_sync() or after it: into this rank's own fp32 sum of the whole
//           unit, which a reducing backward then sends instead of a bucket.
// Every rank takes the same way in the same backward: it depends on the order of calls alone, never
// on which gradients arrived.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "device/streams.h"
#include "kernels/kernels.h"
#include "memory/rank_layout.h"
#include "units/arrivals.h"
#include "units/gradient_batch.h"
#include "units/gradient_sums.h"
#include "units/unit_context.h"
#include "units/unit_parameters.h"

namespace zero_ext {

constexpr int64_t kMaxUnits = 1 << 12;  // of one engine, as far as message tags can tell

class Unit {
 public:
  // `values`: the parameters' present values, in any one floating dtype. `dtype`: what the
  // parameters are computed in.
  // `first_flag`: that of slot 0 among the context's flags.
  Unit(const UnitContext& context, int64_t index, int64_t first_flag, std::string name,
       std::vector<SlotSpec> specs, const std::vector<at::Tensor>& values, at::ScalarType dtype,
       UnitKind kind, Comm& comm, bool broadcast);
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  int64_t index() const { return index_; }
  const std::string& name() const { return name_; }
  const RankLayout& layout() const { return layout_; }
  at::ScalarType dtype() const { return dtype_; }
  UnitParameters& parameters() { return parameters_; }
  const UnitParameters& parameters() const { return parameters_; }
  GradientSums& sums() { return sums_; }
  const GradientSums& sums() const { return sums_; }
  int64_t flag(int64_t i) const { return first_flag_ + i; }
  // What its gradients arrive in, and travel in by exchange; at first dtype(). Before any backward.
  void set_gradient_dtype(at::ScalarType dtype) { gradient_dtype_ = dtype; }

  // One backward. `expected[i]`: autograd will reach slot i.
  void begin_backward(GradientPath path, bool reduces, const std::vector<uint8_t>& expected);
  Arrivals& arrivals() { return arrivals_; }
  const Arrivals& arrivals() const { return arrivals_; }
  // Of this rank's message to the others: the gradients of a backward.
  at::ScalarType message_dtype() const;
  int64_t message_bytes() const {
    return layout_.padded_numel() * static_cast<int64_t>(c10::elementSize(gradient_dtype_));
  }
  // Gradients go into a message that the unit has not been lent: those that arrive are held.
  bool holds_for_message() const { return !message_.defined() && path_ == GradientPath::bucket; }
  // `message`: [padded], message_dtype(). Until return_message().
  void lend_message(const at::Tensor& message);
  void return_message() { message_.reset(); }
  // The reduction starts: the message becomes all that this rank contributes.
  void fill_message();
  // A gradient of slot i; undefined: autograd reached the parameter with nothing. Returns false if
  // it holds NaN or Inf. `scale` is for direct and local sums; what a bucket holds is scaled when
  // it is reduced. Of a gradient that is held, nonfinite_arrived() says so later.
  bool accumulate(int64_t i, const at::Tensor& grad, float scale);
  bool expects_gradients() const { return arrivals_.expects_any(); }
  // This rank has something of slot i to reduce.
  bool contributes(int64_t i) const;
  // No gradient comes any more. What is left to be launched is.
  void flush();
  // The backward cannot be undone any more. `remember`: what came beyond what was expected.
  void end_backward(bool remember);
  // Slots whose held gradients held NaN or Inf.
  const std::vector<int64_t>& nonfinite_arrived() const { return nonfinite_arrived_; }
  // The backward threw: the sums become what they were before it.
  void abort_backward();

  // See FlatBuffer::offload and reload: of the parameters, the masters, the sums.
  void offload(const std::set<std::string>& states);
  void reload();

 private:
  // Arriving
  void check_gradient(int64_t i, const at::Tensor& grad) const;
  // On the host. Returns false where it holds NaN or Inf.
  bool accumulate_at_once(int64_t i, const at::Tensor& grad, bool overwrite, float scale);
  void accumulate_directly(int64_t i, const at::Tensor& grad, float scale, int32_t* nonfinite);
  void accumulate_local(int64_t i, const at::Tensor& grad, int32_t* nonfinite);
  void add_held();
  void accumulate_in_bucket(int64_t i, const at::Tensor& grad, kernels::Write write,
                            int32_t* nonfinite);
  void* staged(int64_t offset) const;
  // On the host; gaps of a device's buckets are cleared at once, when the bucket is lent.
  void clear_gap(int64_t i);
  // The current stream goes on where the bucket's last gradient was put into it.
  void follow_filling_stream();
  // On a device gradients wait until their unit is complete, for one launch: those of sums here.
  void batch(int64_t i, const at::Tensor& grad, bool overwrite, float scale);
  void flush_batched();
  // This rank's own sums; one rank's are the reduced ones.
  GradientBatch::SumOf own_sums() const;
  // All that is held, on a device, in batches of at most one of each slot: `first(i)`, nothing is
  // there yet.
  void launch_held(const std::function<bool(int64_t)>& first,
                   const std::function<void(GradientBatch&)>& launch);
  void add_held_to(const GradientBatch::SumOf& sum_of);
  // Into the bucket.
  void stage_held();

  // Into the message: the local sums, and what arrived in this backward.
  void stage_local();
  void stage_local_slot(int64_t i);
  void stage_local_at_once();  // on a device
  void clear_absent();

  // Constant after construction.
  const UnitContext& context_;
  int64_t index_;
  int64_t first_flag_;
  std::string name_;
  at::ScalarType dtype_;
  at::ScalarType gradient_dtype_;
  RankLayout layout_;

  GradientSums sums_;
  UnitParameters parameters_;

  // One backward.
  Arrivals arrivals_;
  GradientPath path_ = GradientPath::direct;
  bool reduces_ = false;
  float scale_ = 1;                            // of gradients that are added to a local sum
  std::vector<std::vector<at::Tensor>> held_;  // [slots]; dense, strides as the slot's
  GradientBatch batched_;
  std::vector<int64_t> nonfinite_arrived_;
  at::Tensor message_;                    // [padded]; undefined while none is lent
  std::optional<c10::Stream> filled_on_;  // the stream of the last gradient, at first the begin's
};

}  // namespace zero_ext
