// StepAgreement: what all ranks agree on before an update: whether the gradients hold NaN or Inf,
// and their norm.
//
// Owner:     Engine.
// Threads:   called only under the engine's lock.
// Invariant: every rank asks the same questions and reaches the same verdict, from one message of
//            each rank, or two where ranks ran different numbers of backwards. Where the sums lie on
//            a device, the host does not wait for them. A step is rejected with an error where some
//            ranks lack a backward that others have.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "step/step_answer.h"
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
  int64_t values = 0;              // see WrittenValues
  int64_t of_subset = 0;           // both, of parameters that a subset of the ranks holds
  bool meets = false;              // also where nothing is asked
  bool foreign = false;            // other code than ours updates the masters
  // This rank's part of what the gradients are divided by, instead of by `averaged_over`.
  std::optional<double> divide_by{};
  double averaged_over = 1;
  // On the host; empty: complete.
  std::function<MicroBatches()> micro_batches{};
  bool norm() const { return max_norm.has_value(); }
};

// A verdict that only the device knows so far.
struct DeviceVerdict {
  at::Tensor skip;                         // int32 [1]: not 0 where the gradients hold NaN or Inf
  at::Tensor norm;                         // fp32 [], undefined where no norm was asked for
  at::Tensor factor;                       // fp32 [1], as StepVerdict::factor; may be undefined
  at::Tensor nan_record;                   // int64 [1] in pinned host memory: the first, or none
  c10::Event known{c10::DeviceType::CPU};  // when `nan_record` has arrived
  std::shared_ptr<CollectiveWatch> watch;  // null for one rank
  void wait() const { wait_on_host(known, watch.get()); }
  // The same as `skip`, once known.
  bool was_skipped() const { return *nan_record.const_data_ptr<int64_t>() != nan_record::kNone; }
};

// DTensor parameters lie on further dimensions of a mesh, whose ranks run steps of their own over the
// same data. What such a step must know of them, int64 [1 + rows, kSquareSumLength]: first a
// StepOfMesh, then squares of this rank's gradients, where a norm is asked for. Row k is of the
// parameters with that norm_row, which says over which ranks it is summed; row 0 over the engine's.
// The function returns the sums. It runs Python. Collective.
using AcrossMeshes = std::function<at::Tensor(const at::Tensor& own)>;
struct StepOfMesh {
  enum Place : int64_t { kNonfinite, kRejected, kSettings, kRanks };
};

struct StepVerdict {
  // Parameters that must be sharded before the step is prepared: nothing else is known then.
  std::vector<int64_t> unfrozen{};
  bool settings_differ = false;    // between ranks; on a device settle() raises instead
  bool written_differ = false;     // gradients that were written by hand, likewise
  bool values_differ = false;      // parameters that were written, likewise
  bool subset_differs = false;     // both, of parameters that a subset of the ranks holds
  bool meshes_differ = false;      // ranks of another dimension reject the step, or have others
  int64_t incomplete = -1;         // a rank whose micro-batches were too few or not reduced
  int64_t changed_too_early = -1;  // a rank; see MicroBatches
  bool nonfinite = false;
  int64_t rank = -1;  // where the first NaN or Inf was seen
  std::string parameter{};
  int64_t micro_batch = -1;
  int64_t backwards = 0;  // as of this step
  float norm = 0;         // where it was asked for, of the divided gradients
  float factor = 1;       // divides the gradients and clips them to it
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

  void set_across_meshes(AcrossMeshes across) { across_ = std::move(across); }
  // Collective. Raises on every rank where they have finished different backwards. `serve`: takes part in a
  // backward that another rank has begun; see Note [Serving] in serving.h.
  StepVerdict ask(Comm::Agreement about, const std::vector<int64_t>& indices,
                  const StepQuestions& questions, const Meanwhile& serve);
  // Whether the ranks send each other anything for these.
  bool sends(const StepQuestions& questions) const {
    const bool for_all = !replicated() || questions.meets || questions.nonfinite ||
                         questions.norm() || questions.divide_by.has_value();
    return context_.world > 1 && for_all;
  }
  // What this rank tells in any agreement. On a device Serving adds how much it has queued.
  Arrival arrival(MicroBatches micro_batches, int64_t values) const;
  // Waits for the device, and raises what ask() raises on the host.
  void settle(StepVerdict& verdict) const;

 private:
  // One message of each rank.
  struct Round {
    Comm::Agreement about;
    const Meanwhile& serve;
    bool last;  // all ranks have come, so that no backward begins any more
  };
  // None where answers are outdated; not in the last round.
  std::optional<StepVerdict> ask_host(const Round& round, const std::vector<int64_t>& indices,
                                      const StepQuestions& questions);
  std::optional<StepVerdict> ask_device(const Round& round, const std::vector<int64_t>& indices,
                                        const StepQuestions& questions);
  // Every rank holds all gradients, reduced.
  bool replicated() const { return context_.policy.optimizer == Sharding::replicated; }
  StepAnswer own_answer(const std::vector<int64_t>& indices, const StepQuestions& questions) const;
  // On a device: int64, see DeviceAnswer; then this rank's subset and a digest, where there are
  // subsets; then what it divides by, where it is asked for.
  at::Tensor device_answer(const std::vector<int64_t>& indices,
                           const StepQuestions& questions) const;
  // Raises where ranks have finished different backwards. Also agrees on the epoch.
  void check_same_backwards(const Round& round, const std::vector<Arrival>& arrivals) const;
  // The messages of all ranks [world, n], or this one's alone. Undefined where they are outdated:
  // they differ in element `state`.
  at::Tensor gather(const Round& round, const at::Tensor& answer, int64_t state,
                    const StepQuestions& questions);
  // See AcrossMeshes. Tensors of one bool, and the squares of all gradients.
  struct OfMeshes {
    at::Tensor nonfinite;
    at::Tensor differ;  // a rank rejects the step, or has other settings
    at::Tensor squares;
  };
  // `nonfinite`: of this engine's ranks, where the sums lie.
  OfMeshes ask_meshes(const std::vector<int64_t>& indices, const StepQuestions& questions,
                      const at::Tensor& nonfinite, bool rejected) const;
  bool asks_meshes(const StepQuestions& questions) const {
    return across_ != nullptr && (questions.nonfinite || questions.norm());
  }
  // On a device: what divides the gradients [1], of `counts` [world], each the bits of a double.
  static at::Tensor division(const at::Tensor& counts, const StepQuestions& questions);
  // On a device: what the host will know, of tensors of one element. `first`: the first NaN record.
  void record(const at::Tensor& out_of_step, const at::Tensor& nonfinite, const at::Tensor& first,
              DeviceVerdict& verdict) const;
  void describe(int64_t first_record, StepVerdict& verdict) const;
  // The NaN records of the parameters that are asked about.
  std::vector<int64_t> records_of(const std::vector<int64_t>& indices,
                                  const StepQuestions& questions) const;
  // Of the parameters that are asked about; the same on every rank.
  bool has_gradients(const std::vector<int64_t>& indices) const;
  // This rank's part of the reduced gradient of parameter i; none where it holds nothing.
  std::optional<kernels::ReadSegment> own_sum(int64_t i) const;
  // Squares of this rank's reduced gradients; `sum` lies where they do.
  void add_own_squares(const std::vector<int64_t>& indices, kernels::SquareSum* sum) const;

  Comm& comm_;
  const UnitContext& context_;
  const ShardedParameters& parameters_;
  FinishedBackwards& finished_;
  AcrossMeshes across_;
};

}  // namespace zero_ext
