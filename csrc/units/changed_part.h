// A rank's part of a gather as a message to ranks that hold what the part was before.
//
// Note [Changes between hosts]
// Before an update every rank holds the same parameters: it has gathered them, and a step compares
// what the ranks hold (see units/written_values.h). The update marks what it changes. So
// another host needs the changed elements alone, and one bit for each of the others:
//
//   int64       how many elements are marked; -1: all of the part follows
//   uint16 [mark_words(elements)]   see Note [Marks of changed elements] in kernels/changes.h
//   2 bytes for each marked element, see kernels::pack_marked
//
// Where all of the part has fewer bytes, it is sent. Ranks of one host copy the part itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "comm/comm.h"

namespace zero_ext {

// `part`: contiguous, on the host, of elements with 2 bytes. `marks`: null where a receiver may hold
// something else than what the part was before: all of it is sent.
PackedRange packed_changes(const at::Tensor& part, const uint16_t* marks);

}  // namespace zero_ext
