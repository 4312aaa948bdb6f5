// Collectives that c10d calls differently in different versions. Checked with torch 2.11 and 2.13.
#pragma once

#include <torch/headeronly/version.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/message.h"

namespace zero_ext {

// torch 2.13 renamed the single-tensor collectives and deprecates the old names.
inline Message reduce_scatter_into(c10d::ProcessGroup& group, at::Tensor output, at::Tensor input) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return group.reduce_scatter_single(output, input);
#else
  return group._reduce_scatter_base(output, input);
#endif
}

inline Message all_gather_into(c10d::ProcessGroup& group, at::Tensor output, at::Tensor input) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return group.all_gather_single(output, input);
#else
  return group._allgather_base(output, input);
#endif
}

}  // namespace zero_ext
