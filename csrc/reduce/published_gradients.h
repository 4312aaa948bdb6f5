// PublishedGradients: what .grad shows between two backwards. It is a view of each parameter's
// reduced sum, which users may edit, replace or delete.
//
// Owner:     Engine.
// Threads:   called only under the engine's lock.
// Invariant: between two backwards, the .grad of a parameter in a unit is its view, None, or a
//            value that the user has set since.
//
// Note [Kept gradients]
// If a user holds on to p.grad past zero_grad(), it keeps its values, as in PyTorch, where the next
// backward makes a new tensor. Here the sums stay where they are. Hence each view has a storage of
// its own over the memory of the sums. When the sums are cleared while the user still holds that
// storage, through whatever tensors, the storage gets a copy of the values, and .grad shows a new
// view from then on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "units/finished_backwards.h"
#include "units/nan_records.h"
#include "units/sharded_parameters.h"

namespace zero_ext {

// What operations have mixed into a subclass beside others of its kind. Every rank takes its own part
// of such values, so ranks must have mixed in the same. Written under the GIL alone.
struct Edits {
  int64_t digest = 0;  // 0: nothing
};

class PublishedGradients {
 public:
  // A tensor, and what was mixed into it; null: it is no subclass that knows.
  using Edited = std::pair<at::Tensor, std::shared_ptr<Edits>>;
  // This rank's part of a tensor subclass that a user put into .grad, 1-D.
  using LocalReader = std::function<Edited(const at::Tensor&)>;
  // What .grad shows of parameter i, over this rank's slice of the sums.
  using ViewMaker = std::function<Edited(int64_t i, const at::Tensor& local)>;
  // The plain local tensor of a DTensor that is a gradient of parameter i, in the parameter's
  // placement. What `LocalReader` knows is returned as it is.
  using ToLocal = std::function<at::Tensor(int64_t i, const at::Tensor& gradient)>;
  // In place of a digest, of a gradient that became None after so many backwards.
  static int64_t none_after(int64_t backwards) { return -backwards; }
  static bool is_none(int64_t written) { return written < 0 && written > -(int64_t{1} << 31); }

  PublishedGradients(ShardedParameters& parameters, NanRecords& nan_records,
                     FinishedBackwards& finished, int64_t rank, int64_t world)
      : parameters_(parameters),
        nan_records_(nan_records),
        finished_(finished),
        rank_(rank),
        world_(world) {}
  // Takes the views out of .grad: they would break the next backward of a parameter that outlives
  // this.
  ~PublishedGradients();
  PublishedGradients(const PublishedGradients&) = delete;
  PublishedGradients& operator=(const PublishedGradients&) = delete;

  void set_local_reader(LocalReader reader) { local_reader_ = std::move(reader); }
  void set_view_maker(ViewMaker maker) { view_maker_ = std::move(maker); }
  void set_to_local(ToLocal to_local) { to_local_ = std::move(to_local); }
  const ToLocal& to_local() const { return to_local_; }
  // One more parameter, of which nothing is shown yet.
  void add() { entries_.emplace_back(); }
  // Makes the views that were not needed yet. Runs Python, so a forward calls it, or at the latest
  // the beginning of a backward.
  void make_missing_views();
  // Call it after the sums may have moved to other memory.
  void follow_memory();

  // Users' changes of .grad since it was published become the gradient. `verb`: in messages.
  void adopt_changes(const std::vector<int64_t>& indices, const char* verb);
  // A digest of the plain tensors among them that became gradients since the last step, or were
  // mixed into these, and of gradients that became None after its backwards; 0: none. Every rank
  // takes its own part of such a tensor, so ranks must have written the same.
  int64_t written_by_hand(const std::vector<int64_t>& indices) const {
    return digest(indices, /*of_subset=*/false);
  }
  // The same of parameters that a subset of the ranks holds.
  int64_t written_in_subset(const std::vector<int64_t>& indices) const {
    return digest(indices, /*of_subset=*/true);
  }
  // The digest of each parameter among `indices`, int64 [parameters].
  at::Tensor written_digests(const std::vector<int64_t>& indices) const;
  // All sums begin anew, so that it does not matter any more which became None.
  void forget_nones();
  // The ranks agree on them.
  void accept_written(const std::vector<int64_t>& indices);
  // Some .grad was not published here. It may be of a backward that was not seen.
  bool has_foreign() const;
  // Some parameter has a reduced gradient, whether it is shown or not.
  bool has_reduced_gradients() const;
  // Every .grad becomes None.
  void withdraw();
  // See Values::keep_local_gradients().
  bool keeps_local() const { return keeps_local_; }
  void keep_local(const std::vector<int64_t>& all);
  std::map<int64_t, at::Tensor> take_local();
  // The .grad of every parameter with a reduced sum becomes its view.
  void publish();
  // .grad of parameter i becomes its view.
  void show(int64_t i);

  // The gradient of parameter i becomes `grad`, all of it or a subclass that the reader knows.
  void write(int64_t i, const at::Tensor& grad);
  // It becomes none. Tensors that users hold of it keep their values.
  void clear(int64_t i);
  // It becomes none. Tensors that users hold of it will show the next gradient.
  void forget(int64_t i);

 private:
  struct Entry {
    at::Tensor view;                 // undefined until it is needed
    std::shared_ptr<Edits> edits{};  // of `view`; may be null
    at::Tensor local;                // the 1-D tensor that `view` shows; see Note [Kept gradients]
    size_t holders = 0;              // of local's storage, while no user holds it
    void* memory = nullptr;          // of the sums, which the storage shows; null: none
    int64_t version = 0;             // of both, when the user's changes were last adopted
    int64_t written = 0;             // a digest of what the user wrote, or none_after()
    bool shown = false;
  };
  // The digest of what the user has written.
  static void set_written(Entry& entry, int64_t written);
  int64_t digest(const std::vector<int64_t>& indices, bool of_subset) const;
  // Parameter i, which is in a unit, gets a new view. Users who hold the old one keep its values.
  void make_view(int64_t i);
  void follow_memory(int64_t i);
  bool is_kept(int64_t i) const;
  // The user has set the data of the shown tensor to other memory.
  static bool has_other_memory(const Entry& entry);
  // Gives the storage a copy of the sums, for the users who hold it.
  void give_own_memory(Entry& entry) const;

  ShardedParameters& parameters_;
  NanRecords& nan_records_;
  FinishedBackwards& finished_;
  int64_t rank_;
  int64_t world_;
  bool keeps_local_ = false;
  LocalReader local_reader_;
  ViewMaker view_maker_;
  ToLocal to_local_;
  std::vector<Entry> entries_;  // [parameters]
};

}  // namespace zero_ext
