// Changes: what has changed in parameters since an earlier time, for copies of them elsewhere.
//
// Owner:     Engine.
// Threads:   public methods take the lock.
// Invariant: where nothing is said to have changed, the bits are the same.
//
// Updates on the host mark the elements that they change, see units/changed_elements.h. Of all other
// parameters (in fp32, frozen, on a device) a digest tells whether anything has changed. Then all of
// the parameter is sent. So are DTensors, and parameters whose memory is not in rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "engine/engine_parts.h"
#include "engine/values.h"

namespace zero_ext {

// A time. While it lives, changes after it are marked.
struct ChangeToken {
  int64_t generation;
  std::vector<uint64_t> digests;  // [parameters]: of this rank's part; 0: its changes are marked
};

// Of one parameter, on all ranks together.
struct Change {
  static constexpr int64_t kAll =
      -1;               // so many that all of them are smaller, or nobody knows which
  int64_t numel = 0;    // changed elements, or kAll
  uint64_t digest = 0;  // of the whole parameter, see kernels::part_digest
};

// Elements of one parameter.
struct ChangedValues {
  at::Tensor indices;  // int32 or int64 [elements], ascending, in the parameter's memory order
  at::Tensor values;   // [elements], in the parameter's dtype
};

// Of a tensor that begins with element `first` of a whole, see kernels::part_digest.
uint64_t part_digest(const at::Tensor& part, int64_t first);

class Changes : Facet {
 public:
  Changes(EngineParts& parts, const RunningBackward& backward, const Values& values)
      : Facet(parts), backward_(backward), values_(values) {}

  std::shared_ptr<ChangeToken> begin();
  // Before an update: nothing is marked for tokens that nobody holds any more.
  void forget_unused();
  // What has changed in each parameter since then; null: all of it. `wanted`: by this rank.
  // Collective.
  std::vector<Change> count(const std::shared_ptr<ChangeToken>& since, bool wanted);
  // How often count() was called.
  int64_t counted() const { return counted_; }
  // The changed elements of these parameters, where `count`, the last one, has found some but not
  // all. A rank that did not want them gets none. Collective.
  std::vector<ChangedValues> gather(const std::vector<int64_t>& indices, int64_t count);
  // Of all marks, on this rank.
  int64_t bytes() const;

 private:
  struct Own {
    std::optional<at::Tensor> indices;  // of changed elements; none: all may have changed
    uint64_t digest = 0;
    std::vector<int64_t> counts;  // [ranges]: of changed elements
  };
  // Where the message of each range has the elements of a parameter.
  struct Span {
    int64_t indices;  // bytes from the beginning of all messages
    int64_t values;
  };
  struct Messages {
    std::vector<int64_t> bounds{0};        // [ranges + 1], in bytes
    std::vector<std::vector<Span>> spans;  // [ranges][parameters]
  };
  bool is_marked(int64_t i) const;
  // This rank's part of what parameter i holds, with the user's writes. 1-D.
  at::Tensor own_part(int64_t i) const;
  Own own_changes(int64_t i, const ChangeToken* since) const;
  // Of this rank's part, as part of the whole parameter.
  uint64_t digest_of(int64_t i, const at::Tensor& part) const;
  int64_t ranges_of(int64_t i) const;
  // The numbers in the engine of the ranks that hold parameter i: replica by replica, range by range.
  std::vector<int64_t> ranks_of(int64_t i) const;
  // `of_rank(r)`: how many elements rank r has found, and its digest.
  Change agreed_change(int64_t i, const std::function<const int64_t*(int64_t r)>& of_rank);
  Messages messages_of(const std::vector<int64_t>& indices) const;
  at::ScalarType index_dtype(int64_t i) const;
  void end_unused();

  const RunningBackward& backward_;
  const Values& values_;
  int64_t generation_ = 0;
  int64_t counted_ = 0;
  std::vector<std::weak_ptr<ChangeToken>> tokens_;
  std::vector<Own> own_;       // [parameters], of the last count
  std::vector<bool> wanting_;  // [ranks], then
};

}  // namespace zero_ext
