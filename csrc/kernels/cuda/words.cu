// show_words, await_words: see kernels.h.
// Compile alone: nvcc -std=c++20 -O3 -fmad=false -arch=sm_90 -I. -c kernels/cuda/words.cu
//
// One block of as many threads as there are words. Loads and stores are those of the whole system,
// because the words lie in the memory of several devices, and *failed in that of the host.
#include "kernels/cuda/dispatch.h"
#include "kernels/cuda/table.h"

namespace zero_ext::kernels {
namespace {

struct Words {
  uint32_t* word[kMostWords];
};

#if defined(__CUDA_ARCH__)
__device__ inline uint32_t load_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline void store_system(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ inline int64_t now_ns() {
  int64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
__device__ inline void pause() { __nanosleep(200); }
#else  // the emulation in tests/support/cuda_emulation, where nothing is concurrent
__device__ inline uint32_t load_system(const uint32_t* word) { return *word; }
__device__ inline void store_system(uint32_t* word, uint32_t value) { *word = value; }
__device__ inline int64_t now_ns() { return 0; }
__device__ inline void pause() {}
#endif

__global__ void show(const __grid_constant__ Words words, int32_t count, uint32_t* number,
                     bool next, uint32_t tag) {
  const uint32_t value = *number + (next ? 1 : 0);
  __syncthreads();  // all have read it
  const auto k = static_cast<int32_t>(threadIdx.x);
  if (k == 0) *number = value;
  if (k < count) store_system(words.word[k], word_of(value, tag));
}

__global__ void await(const uint32_t* words, int32_t count, const uint32_t* number, uint32_t tag,
                      int64_t timeout_ns, int32_t* failed) {
  const auto k = static_cast<int32_t>(threadIdx.x);
  if (k >= count) return;
  auto* const shared_failed = reinterpret_cast<uint32_t*>(failed);
  const int64_t begin = now_ns();
  uint32_t word = load_system(words + k);
  while (!has_come(word, *number)) {
    if (load_system(shared_failed) != 0) return;
    if (now_ns() - begin >= timeout_ns) {
      store_system(shared_failed, static_cast<uint32_t>(late_word(k)));
      return;
    }
    pause();
    word = load_system(words + k);
  }
  if (tag_of(word) != tag) store_system(shared_failed, static_cast<uint32_t>(odd_word(k)));
}

}  // namespace

Status show_words_cuda(uint32_t* const* words, int32_t count, uint32_t* number, bool next,
                       uint32_t tag, const Launch& launch) {
  if (count < 0 || count > kMostWords || tag > 3) return Status::bad_argument;
  Words all{};
  for (int32_t k = 0; k < count; ++k) all.word[k] = words[k];
  return device::queue(launch, /*blocks_wanted=*/1, show, all, count, number, next, tag);
}

Status await_words_cuda(const uint32_t* words, int32_t count, const uint32_t* number, uint32_t tag,
                        int64_t timeout_ns, int32_t* failed, const Launch& launch) {
  if (count < 0 || count > kMostWords || tag > 3) return Status::bad_argument;
  return device::queue(launch, /*blocks_wanted=*/1, await, words, count, number, tag, timeout_ns,
                       failed);
}

}  // namespace zero_ext::kernels
