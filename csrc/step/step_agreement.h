// StepAgreement: what all ranks agree on before an update: whether the gradients hold NaN or Inf,
// and their norm.
//
// Owner:     Engine.
// Threads:   called only under Engine::mutex_.
// Invariant: every rank asks the same questions and comes to the same verdict, from one message of
//            each. Where the sums lie on a device, nobody waits for them. No step is made of sums
//            that lack a backward on some ranks.
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
#include "units/sharded_parameters.h"
#include "units/unit_context.h"

namespace zero_ext {

// What an update wants to know of the gradients first; every rank asks the same.
struct StepQuestions {
  bool nonfinite = true;           // whether any holds NaN or Inf
  std::optional<double> max_norm;  // and their norm, with the factor that clips them to this one
  int64_t settings = 0;            // a hash of what the update multiplies with
  bool norm() const { return max_norm.has_value(); }
};

// A verdict that the device alone knows so far.
struct DeviceVerdict {
  at::Tensor skip;                        // int32 [1]: not 0 where the gradients hold NaN or Inf
  at::Tensor norm;                        // fp32 [], undefined where it was not asked for
  at::Tensor factor;                      // fp32 [1], of the gradients; undefined likewise
  at::Tensor nan_record;                  // int64 [1] in pinned host memory: the first one, or none
  c10::Event told{c10::DeviceType::CPU};  // `NaN record` is there
  // As `skip`, once told.
  bool was_skipped() const { return *nan_record.const_data_ptr<int64_t>() != nan_record::kNone; }
};

struct StepVerdict {
  bool settings_differ = false;  // between ranks; on a device settle() raises instead
  bool nonfinite = false;
  int64_t rank = -1;  // where the first NaN or Inf was seen
  std::string parameter{};
  int64_t micro_batch = -1;
  float norm = 0;    // where it was asked for
  float factor = 1;  // which clips it
  // Where the sums lie on a device: what is above is not known before settle().
  std::shared_ptr<DeviceVerdict> on_device;
  // Whether settle() would not wait.
  bool is_settled() const { return on_device == nullptr || on_device->told.query(); }
};

class StepAgreement {
 public:
  StepAgreement(Comm& comm, const UnitContext& context, const ShardedParameters& parameters,
                FinishedBackwards& finished)
      : comm_(comm), context_(context), parameters_(parameters), finished_(finished) {}

  // Collective, but that a rank may ask for the norm alone of gradients that every rank holds.
  // Raises on every rank where they have finished different backwards.
  StepVerdict ask(Comm::Agreement about, const std::vector<int64_t>& indices,
                  const StepQuestions& questions) {
    return context_.state.on_host() ? ask_host(about, indices, questions)
                                    : ask_device(about, indices, questions);
  }
  // Waits for what the device knows; raises what ask() raises on the host.
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
  // Parameter i was suspected to hold NaN or Inf here, and does.
  bool holds_nonfinite(int64_t i) const;
  // Whether sums that the user wrote to hold NaN or Inf, into the device's flags.
  void search_suspects(const std::vector<int64_t>& indices);
  // Squares of this rank's reduced gradients; `sum` lies where they do.
  void add_own_squares(const std::vector<int64_t>& indices, kernels::SquareSum* sum) const;

  Comm& comm_;
  const UnitContext& context_;
  const ShardedParameters& parameters_;
  FinishedBackwards& finished_;
};

}  // namespace zero_ext
