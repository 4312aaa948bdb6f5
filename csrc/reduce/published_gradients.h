// PublishedGradients: what .grad shows between two backwards: a view of each parameter's reduced
// sum, which users may edit, replace or delete.
//
// Owner:     Engine.
// Threads:   called only under Engine::mutex_.
// Invariant: between two backwards, the .grad of a parameter in a unit is its view or None, or what
//            the user put there since.
//
// Note [Kept gradients]
// A gradient that a user keeps beyond zero_grad() keeps its values, as in PyTorch, where the next
// backward makes a new tensor. Here the sums stay where they are. So each view has a storage of its
// own, which lends the memory of the sums; where it has holders besides us when the sums are
// cleared, they get a copy under that storage, whatever tensors they have of it, and .grad shows
// another one from then on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "units/nan_records.h"
#include "units/sharded_parameters.h"

namespace zero_ext {

class PublishedGradients {
 public:
  // This rank's part of a tensor subclass that a user put into .grad, 1-D.
  using LocalReader = std::function<at::Tensor(const at::Tensor&)>;
  // What .grad shows of parameter i, over this rank's slice of the sums.
  using ViewMaker = std::function<at::Tensor(int64_t i, const at::Tensor& local)>;

  PublishedGradients(ShardedParameters& parameters, NanRecords& nan_records, int64_t rank)
      : parameters_(parameters), nan_records_(nan_records), rank_(rank) {}
  // A view of our memory left in .grad would break the next backward of a parameter that outlives
  // us.
  ~PublishedGradients();
  PublishedGradients(const PublishedGradients&) = delete;
  PublishedGradients& operator=(const PublishedGradients&) = delete;

  void set_local_reader(LocalReader reader) { local_reader_ = std::move(reader); }
  void set_view_maker(ViewMaker maker) { view_maker_ = std::move(maker); }
  // One more parameter, of which nothing is shown yet.
  void add() { entries_.emplace_back(); }
  // Parameter i, which is in a unit, gets a new view. Who has kept the old one keeps its values.
  void make_view(int64_t i);
  // The sums may lie somewhere else than before.
  void follow_memory();

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
  // It becomes none; what users have kept of it stays what it is.
  void clear(int64_t i);
  // It becomes none, and shows what it will be next to whoever has kept it.
  void forget(int64_t i);

 private:
  struct Entry {
    at::Tensor view;
    at::Tensor local;        // the 1-D tensor that `view` shows; see Note [Kept gradients]
    size_t holders = 0;      // of local's storage, while no user has any
    void* memory = nullptr;  // that the storage lends; null: none
    int64_t version = 0;     // of both, when the gradient was last known to be ours
    bool shown = false;
  };
  void follow_memory(int64_t i);
  bool is_kept(int64_t i) const;
  // The user gave the tensor that is shown another's memory.
  static bool has_other_memory(const Entry& entry);
  // A copy of the sums to the holders of its storage, of which it is no entry any more.
  void give_own_memory(Entry& entry) const;

  ShardedParameters& parameters_;
  NanRecords& nan_records_;
  int64_t rank_;
  LocalReader local_reader_;
  ViewMaker view_maker_;
  std::vector<Entry> entries_;  // [parameters]
};

}  // namespace zero_ext
