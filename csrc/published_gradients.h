// PublishedGradients: what .grad shows between two backwards: a view of each parameter's reduced
// sum, which users may edit, replace or delete.
//
// Owner:     Engine.
// Threads:   called only under Engine::mutex_.
// Invariant: between two backwards, the .grad of a parameter in a unit is its view or None, or what
//            the user put there since.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "device_flags.h"
#include "sharded_parameters.h"

namespace zero_ext {

class PublishedGradients {
 public:
  // This rank's part of a tensor subclass that a user put into .grad, 1-D.
  using LocalReader = std::function<at::Tensor(const at::Tensor&)>;

  // `flags`: of a device's kernels, or null.
  PublishedGradients(ShardedParameters& parameters, DeviceFlags* flags, int64_t rank)
      : parameters_(parameters), flags_(flags), rank_(rank) {}
  // A view of our memory left in .grad would break the next backward of a parameter that outlives
  // us.
  ~PublishedGradients();
  PublishedGradients(const PublishedGradients&) = delete;
  PublishedGradients& operator=(const PublishedGradients&) = delete;

  void set_local_reader(LocalReader reader) { local_reader_ = std::move(reader); }
  // One more parameter, of which nothing is shown yet.
  void add() { entries_.emplace_back(); }
  // What .grad shows of parameter i: `view` over `local`, its slice of the sums.
  void set_view(int64_t i, const at::Tensor& view, const at::Tensor& local);

  // What users did to .grad since it was published becomes the gradient. `verb`: in messages.
  void take_over(const std::vector<int64_t>& indices, const char* verb);
  // A gradient lies in .grad that we did not put there, perhaps of a backward that was not seen.
  bool has_foreign() const;
  // .grad becomes None, of all; and a view again, of all that have a sum.
  void withdraw();
  void publish();
  // .grad of parameter i becomes its view.
  void show(int64_t i);

  // The gradient of parameter i becomes `grad`, all of it or a subclass that the reader knows.
  void write(int64_t i, const at::Tensor& grad);
  // It becomes none.
  void clear(int64_t i);

 private:
  struct Entry {
    at::Tensor view;
    at::Tensor local;     // the 1-D tensor that `view` shows
    int64_t version = 0;  // of both, when the gradient was last known to be ours
    bool shown = false;
  };

  ShardedParameters& parameters_;
  DeviceFlags* flags_;
  int64_t rank_;
  LocalReader local_reader_;
  std::vector<Entry> entries_;  // [parameters]
};

}  // namespace zero_ext
