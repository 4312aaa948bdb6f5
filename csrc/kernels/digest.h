// A digest of bytes in host memory. It is no part of struct Kernels: devices do not need it.
#pragma once

#include <cstdint>

namespace zero_ext::kernels {

// 64 bits. The same on every machine; a change of a single bit always changes them.
uint64_t digest(const void* data, int64_t bytes);

}  // namespace zero_ext::kernels
