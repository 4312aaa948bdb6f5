// StepAgreement: what all ranks agree on before an update: whether the gradients hold NaN or Inf,
// and their norm.
//
// Owner:     Engine.
// Threads:   called only under the engine's lock.
// Invariant: every rank asks the same questions and reaches the same verdict, from one message of
//            each rank. Where the sums lie on a device, the host does not wait for them. A step is
//            rejected with an error where some ranks lack a backward that others have.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "units/finished_backwards.h"
#include "units/nan_records.h"
#include "units/sharded_parameters.h"
#include "units/unit_context.h"

namespace zero_ext {

// What must be known of the gradients before an update. Every rank asks the same.
struct StepQuestions {
  bool nonfinite = true;           // whether any holds NaN or Inf
  std::optional<double> max_norm;  // their norm, and the factor that clips it to this
  int64_t settings = 0;            // a hash of the numbers that the update uses
  int64_t written = 0;             // see PublishedGradients::written_by_hand
  bool foreign = false;            // other code than ours updates the masters
  bool norm() const { return max_norm.has_value(); }
};

// A verdict that only the device knows so far.
struct DeviceVerdict {
  at::Tensor skip;                         // int32 [1]: not 0 where the gradients hold NaN or Inf
  at::Tensor norm;                         // fp32 [], undefined where no norm was asked for
  at::Tensor factor;                       // fp32 [1], clips the gradients; undefined likewise
  at::Tensor nan_record;                   // int64 [1] in pinned host memory: the first, or none
  c10::Event known{c10::DeviceType::CPU};  // when `nan_record` has arrived
  // The same as `skip`, once known.
  bool was_skipped() const { return *nan_record.const_data_ptr<int64_t>() != nan_record::kNone; }
};

struct StepVerdict {
  // Parameters that must be sharded before the step is prepared: nothing else is known then.
  std::vector<int64_t> unfrozen{};
  bool settings_differ = false;  // between ranks; on a device settle() raises instead
  bool written_differ = false;   // gradients that were written by hand, likewise
  bool nonfinite = false;
  int64_t rank = -1;  // where the first NaN or Inf was seen
  std::string parameter{};
  int64_t micro_batch = -1;
  int64_t backwards = 0;  // as of this step
  float norm = 0;         // where it was asked for
  float factor = 1;       // clips the gradients to it
  // Where the sums lie on a device: the fields above are unknown before settle().
  std::shared_ptr<DeviceVerdict> on_device{};
  // Whether settle() would not wait.
  bool is_settled() const { return on_device == nullptr || on_device->known.query(); }
};

class StepAgreement {
 public:
  StepAgreement(Comm& comm, const UnitContext& context, const ShardedParameters& parameters,
                FinishedBackwards& finished)
      : comm_(comm), context_(context), parameters_(parameters), finished_(finished) {}

  // Collective. Exception: where every rank holds all gradients, a rank may ask for the norm alone.
  // Raises on every rank where they have finished different backwards.
  StepVerdict ask(Comm::Agreement about, const std::vector<int64_t>& indices,
                  const StepQuestions& questions) {
    return context_.state.on_host() ? ask_host(about, indices, questions)
                                    : ask_device(about, indices, questions);
  }
  // Waits for the device, and raises what ask() raises on the host.
  void settle(StepVerdict& verdict) const;

 private:
  StepVerdict ask_host(Comm::Agreement about, const std::vector<int64_t>& indices,
                       const StepQuestions& questions);
  StepVerdict ask_device(Comm::Agreement about, const std::vector<int64_t>& indices,
                         const StepQuestions& questions);
  // Every rank holds all gradients, reduced.
  bool replicated() const { return context_.policy.optimizer == Sharding::replicated; }
  // The answers of all ranks [world, n], or this one's alone.
  at::Tensor gather(Comm::Agreement about, const at::Tensor& answer,
                    const StepQuestions& questions);
  void describe(int64_t first_record, StepVerdict& verdict) const;
  // The NaN records of the parameters that are asked about.
  std::vector<int64_t> records_of(const std::vector<int64_t>& indices,
                                  const StepQuestions& questions) const;
  // This rank's part of the reduced gradient of parameter i; none where it holds nothing.
  std::optional<kernels::ReadSegment> own_sum(int64_t i) const;
  // Squares of this rank's reduced gradients; `sum` lies where they do.
  void add_own_squares(const std::vector<int64_t>& indices, kernels::SquareSum* sum) const;

  Comm& comm_;
  const UnitContext& context_;
  const ShardedParameters& parameters_;
  FinishedBackwards& finished_;
};

}  // namespace zero_ext
