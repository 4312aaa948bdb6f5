#include "units/gradient_intake.h"

#include "memory/storage.h"
#include "units/device_intake.h"
#include "units/host_intake.h"

namespace zero_ext {

std::unique_ptr<GradientIntake> GradientIntake::create(const UnitContext& context,
                                                       const RankLayout& layout, GradientSums& sums,
                                                       Arrivals& arrivals, int64_t first_record) {
  if (context.compute.on_host()) {
    return std::make_unique<HostIntake>(context, layout, sums, arrivals, first_record);
  }
  return std::make_unique<DeviceIntake>(context, layout, sums, arrivals, first_record);
}

void GradientIntake::begin_backward(GradientPath path, bool reduces) {
  path_ = path;
  reduces_ = reduces;
  begin_on_stream();
}

void GradientIntake::take(int64_t i, const at::Tensor& grad, bool first, float scale) {
  follow_stream();
  if (path_ == GradientPath::local) scale_ = scale;
  // See Note [Undoing] in gradient_sums.h.
  const bool joins_local = path_ == GradientPath::local && (reduces_ || !sums_.local_was_fresh(i));
  if (arrivals_.reduced() || joins_local || holds_for_message()) {
    held_[i].push_back(grad);
  } else {
    add(i, grad, first, scale);
  }
}

void GradientIntake::lend_message(const at::Tensor& message) {
  message_ = message;
  message_was_lent();
}

void GradientIntake::fill_message() {
  arrivals_.start_reduction();
  flush();
  sums_.need();  // of the stream that computes
  stage();
}

bool GradientIntake::end_backward() {
  const bool goes_on = path_ == GradientPath::local && !reduces_;
  if (goes_on) add_held_to_local();
  return goes_on;
}

void GradientIntake::abort_backward() {
  drop_waiting();
  for (auto& grads : held_) grads.clear();
  message_.reset();
}

void* GradientIntake::in_message(int64_t offset) const { return mutable_element(message_, offset); }

}  // namespace zero_ext
