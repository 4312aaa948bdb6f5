// Boundary: which backwards of a step reduce, and what gradients are multiplied by on their way
// into the sums.
//
// Owner:     Engine.
// Threads:   called only under Engine::mutex_.
// Invariant: reduces() and local_next() depend on the order of calls alone, so that they are the
//            same on every rank, also on one that runs no backward.
//
// Note [Loss scale]
// Gradients of a scaled loss are divided by the scale where they are added to the fp32 sum, by the
// factor that divides by the number of ranks, so that it costs nothing, .grad shows true gradients
// whenever it is looked at, and micro-batches of different scales add up. What travels, and what is
// searched for NaN and Inf, still has the scale. Rejected: dividing in the update kernel, which is
// wrong once the scale has changed between two micro-batches, and makes every reader of .grad ask
// for the scale. Local sums keep the scale of the first micro-batch, since a reduction in half
// precision may have to send them; contributions of another scale are converted to it. The first
// one is told by local_next().
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
  double divide_factor() const { return options_.divide_factor; }
  void set_divide_factor(double factor) { options_.divide_factor = factor; }
  void set_loss_scale(double scale);
  // What the sum over the ranks of a scaled loss's gradients is divided by.
  double divisor() const { return divide() * loss_scale_; }

  // The coming backward is the last one before a step, and whether it reduces.
  bool reached() const;
  bool reduces() const { return !options_.sums_locally || reached(); }
  // This rank has local sums that were not reduced.
  bool local_open() const { return unreduced_ > 0; }
  int64_t unreduced() const { return unreduced_; }  // how many backwards they are of
  // The next reduction is of local sums.
  bool local_next() const { return local_next_; }
  int64_t micro_batch() const { return micro_batch_; }  // backwards since the last step
  // `local`: the backward adds to local sums.
  GradientScales scales(bool local) const;

  void end_backward(bool reduced);
  // One that brought no gradients of this rank, and reduced.
  void end_others_backward();
  void end_step();
  // Every gradient was given up: a step that was begun is over.
  void give_up_step();

 private:
  void set_local_next(bool next);
  double divide() const {
    return options_.divide_factor > 0 ? options_.divide_factor
                                      : static_cast<double>(options_.world);
  }

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
