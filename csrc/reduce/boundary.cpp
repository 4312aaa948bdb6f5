#include "reduce/boundary.h"

namespace zero_ext {

void Boundary::push_no_sync() {
  ++no_sync_depth_;
  // Decided here and not by the backwards inside: a rank may run none.
  if (options_.world > 1 && options_.sums_locally) set_local_next(true);
}

void Boundary::set_loss_scale(double scale) {
  loss_scale_ = scale;
  if (!local_next_) local_loss_scale_ = scale;
}

bool Boundary::reached() const {
  return no_sync_depth_ == 0 && (since_boundary_ + 1) % options_.accumulation_steps == 0;
}

int64_t Boundary::missing() const {
  const int64_t begun = since_boundary_ % options_.accumulation_steps;
  return begun == 0 ? 0 : options_.accumulation_steps - begun;
}

GradientScales Boundary::scales(bool local) const {
  const auto reduce =
      static_cast<float>(1.0 / (divide() * (local ? local_loss_scale_ : loss_scale_)));
  return {.accumulate = local ? static_cast<float>(local_loss_scale_ / loss_scale_) : reduce,
          .reduce = reduce};
}

void Boundary::end_backward(bool reduced) {
  unreduced_ = options_.world > 1 && !reduced ? unreduced_ + 1 : 0;
  set_local_next(local_open());
  ++micro_batch_;
  since_boundary_ = reached() ? 0 : since_boundary_ + 1;
}

void Boundary::end_others_backward() {
  unreduced_ = 0;
  set_local_next(false);
}

void Boundary::end_step() {
  micro_batch_ = 0;
  since_boundary_ = 0;
}

void Boundary::give_up_step() {
  end_step();
  unreduced_ = 0;
  set_local_next(no_sync_depth_ > 0 && local_next_);
}

void Boundary::set_local_next(bool next) {
  local_next_ = next;
  if (!next) local_loss_scale_ = loss_scale_;
}

}  // namespace zero_ext
