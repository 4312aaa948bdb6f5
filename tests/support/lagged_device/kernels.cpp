// The table of kernels of the device "lagged": each entry copies its arguments and queues zero_ext's
// CPU kernel on its stream, which reads and writes through all pointers when the task runs, as on
// CUDA.
#include "kernels/kernels.h"

#include <atomic>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "capture.h"
#include "runtime.h"

namespace lagged {
namespace {

using namespace zero_ext::kernels;  // NOLINT: this file is that namespace's table for one device

const Kernels* host = nullptr;  // the CPU's

// The stream of a launch, after what CUDA would refuse or crash on.
Queue* stream_of(const Launch& launch, std::initializer_list<const void*> pointers) {
  static thread_local std::string error;
  Queue* queue = queue_of(launch.stream);
  error.clear();
  if (queue == nullptr) {
    error = "no stream of this device";
  } else if (queue->device != current_device()) {
    error = "a stream of lagged:" + std::to_string(queue->device) +
            ", but the current device is lagged:" + std::to_string(current_device());
  } else {
    for (const void* pointer : pointers) {
      if (pointer != nullptr && device_of(pointer) != queue->device) {
        error = "a pointer that is no memory of lagged:" + std::to_string(queue->device);
      }
    }
  }
  if (error.empty()) return queue;
  if (launch.error != nullptr) *launch.error = error.c_str();
  return nullptr;
}

std::atomic<int64_t> calls{0};

template <typename Call>
Status queue_call(const char* name, const Launch& launch,
                  std::initializer_list<const void*> pointers, Call call) {
  Queue* queue = stream_of(launch, pointers);
  if (queue == nullptr) return Status::launch_failed;
  ++calls;
  capture::launched(*queue);
  queue->push([name, call] {
    if (call(Launch{}) != Status::ok)
      throw std::runtime_error(std::string(name) + ": bad argument");
  });
  return Status::ok;
}

// A pointer that is read or written, or null where nothing is.
const void* used(const void* pointer, int64_t numel) { return numel > 0 ? pointer : nullptr; }

Status accumulate_list_lagged(const AccumulateSegment* segments, int64_t count, DType dtype,
                              float scale, bool fresh, int32_t* nonfinite, const Launch& launch) {
  const std::vector<AccumulateSegment> list(segments, segments + count);
  for (const auto& segment : list) {
    if (stream_of(launch, {used(segment.grad, segment.numel), used(segment.sum, segment.numel)}) ==
        nullptr) {
      return Status::launch_failed;
    }
  }
  return queue_call("accumulate_list", launch, {nonfinite}, [=](const Launch& serial) {
    return host->accumulate_list(list.data(), static_cast<int64_t>(list.size()), dtype, scale,
                                 fresh, nonfinite, serial);
  });
}

Status accumulate_ranks_lagged(const void* const* grads, int32_t ranks, DType dtype, float* sum,
                               int64_t numel, float scale, bool fresh, int32_t* nonfinite,
                               const Launch& launch) {
  const std::vector<const void*> list(grads, grads + ranks);
  for (const void* grad : list) {
    if (stream_of(launch, {used(grad, numel)}) == nullptr) return Status::launch_failed;
  }
  return queue_call("accumulate_ranks", launch, {used(sum, numel), nonfinite},
                    [=](const Launch& serial) {
                      return host->accumulate_ranks(list.data(), ranks, dtype, sum, numel, scale,
                                                    fresh, nonfinite, serial);
                    });
}

Status adam_lagged(const AdamArgs& args, const Launch& launch) {
  const std::vector<UpdateSegment> list(args.segments, args.segments + args.count);
  const int64_t n = list.empty() ? args.numel : args.count;
  return queue_call("adam", launch,
                    {used(args.master, n), used(args.param, n), used(args.grad, n),
                     used(args.exp_avg, n), used(args.exp_avg_sq, n), used(args.exp_avg_scale, n),
                     used(args.exp_avg_sq_scale, n), used(args.max_exp_avg_sq, n),
                     args.on_device.skip, args.on_device.steps_done, args.on_device.grad_factor},
                    [args, list](const Launch& serial) {
                      AdamArgs own = args;
                      if (own.segments != nullptr) own.segments = list.data();
                      return host->adam(own, serial);
                    });
}

Status sgd_lagged(const SgdArgs& args, const Launch& launch) {
  const std::vector<UpdateSegment> list(args.segments, args.segments + args.count);
  const int64_t n = list.empty() ? args.numel : args.count;
  return queue_call(
      "sgd", launch,
      {used(args.master, n), used(args.param, n), used(args.grad, n), used(args.momentum_buffer, n),
       args.on_device.skip, args.on_device.steps_done, args.on_device.grad_factor},
      [args, list](const Launch& serial) {
        SgdArgs own = args;
        if (own.segments != nullptr) own.segments = list.data();
        return host->sgd(own, serial);
      });
}

Status cast_lagged(const void* source, DType source_dtype, void* target, DType target_dtype,
                   int64_t numel, const Launch& launch) {
  return queue_call("cast", launch, {used(source, numel), used(target, numel)},
                    [=](const Launch& serial) {
                      return host->cast(source, source_dtype, target, target_dtype, numel, serial);
                    });
}

Status flatten_lagged(const CopySegment* segments, int64_t count, DType source_dtype,
                      DType target_dtype, Write write, int32_t* nonfinite, const Launch& launch) {
  const std::vector<CopySegment> list(segments, segments + count);
  for (const auto& segment : list) {
    if (stream_of(launch, {used(segment.source, segment.numel),
                           used(segment.target, segment.numel)}) == nullptr) {
      return Status::launch_failed;
    }
  }
  return queue_call("flatten", launch, {nonfinite}, [=](const Launch& serial) {
    return host->flatten(list.data(), static_cast<int64_t>(list.size()), source_dtype, target_dtype,
                         write, nonfinite, serial);
  });
}

Status find_nonfinite_lagged(const ReadSegment* segments, int64_t count, const Launch& launch) {
  const std::vector<ReadSegment> list(segments, segments + count);
  for (const auto& segment : list) {
    if (stream_of(launch, {used(segment.value, segment.numel), segment.nonfinite}) == nullptr) {
      return Status::launch_failed;
    }
  }
  return queue_call("find_nonfinite", launch, {}, [=](const Launch& serial) {
    return host->find_nonfinite(list.data(), static_cast<int64_t>(list.size()), serial);
  });
}

Status add_squares_lagged(const float* value, int64_t numel, SquareSum* sum, const Launch& launch) {
  return queue_call("add_squares", launch, {used(value, numel), sum}, [=](const Launch& serial) {
    return host->add_squares(value, numel, sum, serial);
  });
}

Status adopt_writes_lagged(const void* param, DType param_dtype, float* master, int64_t numel,
                           const Launch& launch) {
  return queue_call("adopt_writes", launch, {used(param, numel), used(master, numel)},
                    [=](const Launch& serial) {
                      return host->adopt_writes(param, param_dtype, master, numel, serial);
                    });
}

Status clip_factor_lagged(const SquareSum* sum, double max_norm, float* norm, float* factor,
                          const Launch& launch) {
  return queue_call("clip_factor", launch, {sum, norm, factor}, [=](const Launch& serial) {
    return host->clip_factor(sum, max_norm, norm, factor, serial);
  });
}

Status show_words_lagged(uint32_t* const* words, int32_t count, uint32_t* number, bool next,
                         uint32_t tag, const Launch& launch) {
  const std::vector<uint32_t*> list(words, words + count);
  for (const uint32_t* word : list) {
    if (stream_of(launch, {word}) == nullptr) return Status::launch_failed;
  }
  return queue_call("show_words", launch, {number}, [=](const Launch& serial) {
    return host->show_words(list.data(), count, number, next, tag, serial);
  });
}

Status await_words_lagged(const uint32_t* words, int32_t count, const uint32_t* number,
                          uint32_t tag, int64_t timeout_ns, int32_t* failed, const Launch& launch) {
  if (!is_pinned(failed)) return Status::launch_failed;
  return queue_call("await_words", launch, {words, number}, [=](const Launch& serial) {
    return host->await_words(words, count, number, tag, timeout_ns, failed, serial);
  });
}

// A new kernel must get its row here: what is not named would be null.
static_assert(sizeof(Kernels) == 14 * sizeof(void*));

constexpr Kernels kTable{
    .accumulate_list = accumulate_list_lagged,
    .accumulate_ranks = accumulate_ranks_lagged,
    .adam = adam_lagged,
    .sgd = sgd_lagged,
    .cast = cast_lagged,
    .flatten = flatten_lagged,
    .find_nonfinite = find_nonfinite_lagged,
    .add_squares = add_squares_lagged,
    .adopt_writes = adopt_writes_lagged,
    .clip_factor = clip_factor_lagged,
    .show_words = show_words_lagged,
    .await_words = await_words_lagged,
    .capture_id = [](void* stream) -> uint64_t { return capture::id_of(*queue_of(stream)); },
    .ask_during_captures = capture::let_this_thread_ask,
};

}  // namespace
}  // namespace lagged

LAGGED_EXPORT const void* lagged_kernels(const void* of_the_cpu) {
  lagged::host = static_cast<const zero_ext::kernels::Kernels*>(of_the_cpu);
  return &lagged::kTable;
}
LAGGED_EXPORT int64_t lagged_kernel_calls() { return lagged::calls; }
