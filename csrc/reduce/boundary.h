// Boundary: which backwards of a step reduce, and which factors gradients are multiplied by before
// they are added to the sums.
//
// Owner:     Engine.
// Threads:   called only under the engine's lock.
// Invariant: reduces() and local_next() depend on the order of calls alone. Hence they are the same
//            on every rank, also on a rank that runs no backward.
//
// Note [Loss scale]
// Gradients of a scaled loss are divided by the scale when they are added to the fp32 sum. The
// factor that divides by the number of ranks does that as well, so it costs nothing. Hence .grad
// shows true gradients at any time, and micro-batches of different scales add up. Messages between
// ranks still have the scale, and so do the gradients that are searched for NaN and Inf.
//
// Rejected: dividing in the update kernel. That is wrong once the scale has changed between two
// micro-batches, and every reader of .grad would need the scale.
//
// Local sums keep the scale of the first micro-batch, because a reduction in half precision may
// have to send them. Contributions of another scale are converted to it. The first micro-batch is
// the one for which local_next() is false.
#pragma once

#include <cstdint>

namespace zero_ext {

struct GradientScales {
  float accumulate = 1;  // of gradients that are added to a direct or a local sum
  float reduce = 1;      // of what a reduction adds
};

class Boundary {
 public:
  struct Options {
    int64_t world = 1;
    bool sums_locally = false;       // backwards before the boundary do not reduce
    int64_t accumulation_steps = 1;  // every n-th backward is a boundary
    double divide_factor = 0;        // gradients are divided by it; 0: by the number of ranks
  };
  explicit Boundary(Options options) : options_(options) {}

  void push_no_sync();
  void pop_no_sync() { --no_sync_depth_; }
  int64_t accumulation_steps() const { return options_.accumulation_steps; }
  // How many backwards are missing to the boundary. 0 right after it, or before the first one.
  int64_t missing() const;
  double divide_factor() const { return options_.divide_factor; }
  // What gradients of a loss without a scale are divided by.
  double divide() const {
    return options_.divide_factor > 0 ? options_.divide_factor
                                      : static_cast<double>(options_.world);
  }
  void set_divide_factor(double factor) { options_.divide_factor = factor; }
  void set_loss_scale(double scale);
  // Divides the sum over the ranks of a scaled loss's gradients.
  double divisor() const { return divide() * loss_scale_; }

  // The coming backward is the last one before a step.
  bool reached() const;
  // The coming backward reduces.
  bool reduces() const { return !options_.sums_locally || reached(); }
  // This rank has local sums that were not reduced.
  bool local_open() const { return unreduced_ > 0; }
  int64_t unreduced() const { return unreduced_; }  // the number of their backwards
  // The next reduction is of local sums, on this rank or on others. With accumulation_steps it always
  // is: the boundary is never the first backward.
  bool local_next() const {
    const bool accumulates = options_.sums_locally && options_.accumulation_steps > 1;
    return local_next_ || (options_.world > 1 && accumulates);
  }
  int64_t micro_batch() const { return micro_batch_; }  // backwards since the last step
  // `local`: the backward adds to local sums.
  GradientScales scales(bool local) const;

  void end_backward(bool reduced);
  // The end of a backward that reduced, and in which this rank had no gradients.
  void end_others_backward();
  void end_step();
  // Every gradient was discarded: a step that was begun is over.
  void give_up_step();

 private:
  void set_local_next(bool next);

  Options options_;
  int64_t no_sync_depth_ = 0;
  int64_t micro_batch_ = 0;
  int64_t since_boundary_ = 0;  // backwards since the last boundary
  int64_t unreduced_ = 0;
  bool local_next_ = false;
  double loss_scale_ = 1;
  double local_loss_scale_ = 1;  // that of the local sums; loss_scale_ unless local_next_
};

}  // namespace zero_ext
