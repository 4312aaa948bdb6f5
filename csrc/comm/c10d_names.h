// Collectives that torch 2.13 renamed; it deprecates their old names.
#pragma once

#include <torch/headeronly/version.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace zero_ext {

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
constexpr auto kAllGather = &c10d::ProcessGroup::all_gather_single;
constexpr auto kReduceScatter = &c10d::ProcessGroup::reduce_scatter_single;
#else
constexpr auto kAllGather = &c10d::ProcessGroup::_allgather_base;
constexpr auto kReduceScatter = &c10d::ProcessGroup::_reduce_scatter_base;
#endif

}  // namespace zero_ext
