// Runs the CUDA kernels on the host (cuda_runtime.h beside this file) and the extension's CPU kernels
// on the same data, and compares every byte of every buffer, what surrounds the ranges included. Any
// two NaN of float32 are equal. Prints the number of comparisons; exits with 1 at the first
// difference. Built and run by tests/kernels/test_cuda_sources.py.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cuda/table.h"
#include "kernels/kernels.h"

namespace {

using namespace zero_ext::kernels;

const Kernels* host = nullptr;  // the CPU's

const std::vector<int64_t> kLengths = {0, 1, 7, 8, 9, 33, 1083, 4097, 300007};
const std::vector<int64_t> kShort = {0, 1, 7, 8, 9, 1083, 20011};
const std::vector<DType> kDTypes = {DType::f32, DType::bf16, DType::f16};
constexpr int64_t kMargin = 32;  // elements around each range: whole lines

// splitmix64: most of the time of mt19937_64's buffers was its own.
struct Generator {
  uint64_t state;
  uint64_t operator()() {
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
};

Generator generator{7};
int64_t comparisons = 0;

struct alignas(64) Line {
  uint64_t words[8];
};

// `numel` elements, `offset` elements after a 64-byte boundary, with a margin on both sides.
struct Buffer {
  std::vector<Line> storage;
  DType dtype;
  int64_t numel;
  int64_t offset;

  Buffer(DType of, int64_t count, int64_t at)
      : storage((count + at + 2 * kMargin) * element_bytes(of) / 64 + 1),
        dtype(of),
        numel(count),
        offset(at) {
    for (Line& line : storage) {
      for (uint64_t& word : line.words) word = generator();
    }
    std::vector<float> values(count);
    for (float& element : values) element = value();
    host->cast(values.data(), DType::f32, data(), of, count, {});
  }
  Buffer(const Buffer&) = default;

  static float value() {
    const uint64_t random = generator();
    const float mantissa = static_cast<float>(static_cast<int32_t>(random)) * 0x1p-31F;
    return mantissa * std::bit_cast<float>(static_cast<uint32_t>(127 - 8 + (random >> 60)) << 23);
  }

  char* data() {
    return reinterpret_cast<char*>(storage.data()) + (kMargin + offset) * element_bytes(dtype);
  }
  float* floats() { return reinterpret_cast<float*>(data()); }

  void set(int64_t i, float to) { host->cast(&to, DType::f32, at(i), dtype, 1, {}); }
  char* at(int64_t i) { return data() + i * element_bytes(dtype); }
  float get(int64_t i) {
    float result = 0;
    host->cast(at(i), dtype, &result, DType::f32, 1, {});
    return result;
  }
};

[[noreturn]] void fail(const std::string& what) {
  std::printf("differs: %s\n", what.c_str());
  std::exit(1);
}

void same(const std::string& what, Buffer& a, Buffer& b) {
  ++comparisons;
  if (std::memcmp(a.storage.data(), b.storage.data(), a.storage.size() * sizeof(Line)) == 0) return;
  for (int64_t i = -kMargin; i < a.numel + kMargin; ++i) {
    if (std::memcmp(a.at(i), b.at(i), element_bytes(a.dtype)) == 0) continue;
    const float x = a.get(i);
    const float y = b.get(i);
    const bool are_nan = a.dtype == DType::f32 && std::isnan(x) && std::isnan(y);
    if (are_nan && i >= 0 && i < a.numel) continue;
    fail(what + ": element " + std::to_string(i) + " of " + std::to_string(a.numel) + " is " +
         std::to_string(x) + " on the CPU, " + std::to_string(y) + " on the device");
  }
}

void succeeded(const std::string& what, Status status) {
  if (status != Status::ok) fail(what + ": status " + std::to_string(static_cast<int>(status)));
}

std::string name(const char* kernel, DType dtype, int64_t numel, int64_t offset) {
  return std::string(kernel) + " dtype " + std::to_string(static_cast<int>(dtype)) + " numel " +
         std::to_string(numel) + " offset " + std::to_string(offset);
}

// Calls test(numel, offset, other_offset) for the lengths, aligned and not.
void for_shapes(const std::vector<int64_t>& lengths,
                const std::function<void(int64_t, int64_t, int64_t)>& test) {
  for (const int64_t numel : lengths) {
    for (const int64_t offset : {0, 1, 4}) {
      for (const int64_t other : {0, 3}) {
        if (numel <= 70001 || (offset != 4 && other == 0)) test(numel, offset, other);
      }
    }
  }
}

void special(Buffer& buffer) {
  const float values[] = {std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN(),
                          1e-40F,
                          -0.0F,
                          65519.0F,
                          65520.0F,
                          3.3e38F,
                          6e-8F,
                          1.00390625F};
  for (int64_t i = 0; i < buffer.numel; i += 3) buffer.set(i, values[generator() % 10]);
}

void test_accumulate(DType dtype, int64_t numel, int64_t offset, int64_t other) {
  for (const int mode : {0, 1, 2, 3}) {  // fresh; special values
    Buffer grad(dtype, numel, offset);
    if (mode >= 2) special(grad);
    Buffer cpu(DType::f32, numel, other);
    Buffer device = cpu;
    int32_t flags[2] = {0, 0};
    const float scale = mode == 1 ? 0.3F : 0.25F;
    const bool fresh = mode % 2 == 1;
    const std::string what = name("accumulate", dtype, numel, offset);
    host->accumulate(grad.data(), dtype, cpu.floats(), numel, scale, fresh, &flags[0], {});
    succeeded(what, cuda().accumulate(grad.data(), dtype, device.floats(), numel, scale, fresh,
                                      &flags[1], {}));
    same(what, cpu, device);
    if (flags[0] != flags[1]) fail(what + ": flag");
  }
}

void test_accumulate_ranks(DType dtype, int64_t numel, int64_t offset, int64_t other) {
  for (const int32_t ranks : {1, 2, 3, 4, 5, 9, 17, 1030}) {
    if (ranks > 100 && numel > 100) continue;
    for (const bool fresh : {false, true}) {
      std::vector<Buffer> grads;
      for (int32_t rank = 0; rank < ranks; ++rank) grads.emplace_back(dtype, numel, offset);
      Buffer cpu(DType::f32, numel, other);
      Buffer device = cpu;
      std::vector<const void*> pointers;
      for (Buffer& grad : grads) pointers.push_back(grad.data());
      const bool from_sum = dtype == DType::f32 && ranks > 2;
      int32_t flags[2] = {0, 0};
      const std::string what = name("accumulate_ranks", dtype, numel, offset);
      if (from_sum) pointers[1] = cpu.data();
      host->accumulate_ranks(pointers.data(), ranks, dtype, cpu.floats(), numel, 0.3F, fresh,
                             &flags[0], {});
      if (from_sum) pointers[1] = device.data();
      succeeded(what, accumulate_ranks_cuda(pointers.data(), ranks, dtype, device.floats(), numel,
                                            0.3F, fresh, &flags[1], {}));
      same(what, cpu, device);
      if (flags[0] != flags[1]) fail(what + ": flag");
    }
  }
}

// Lists longer than one launch holds, with empty, short and long segments.
void test_lists(DType source, DType target, Write write) {
  for (const int64_t count : {0, 1, 5, 64, 65, 2050}) {
    std::vector<int64_t> numels;
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t longest = count == 5 ? 20000 : count == 2050 ? 40 : 9000;
      numels.push_back(i % 7 == 3 ? 0 : static_cast<int64_t>(generator() % longest));
      total += numels.back() + 3;
    }
    Buffer from(source, total, 0);
    if (count == 65) special(from);
    for (const bool is_sum : {false, true}) {
      if (is_sum && target != DType::f32) continue;
      Buffer cpu(target, total, 1);
      Buffer device = cpu;
      int32_t flags[2] = {0, 0};
      // Every other segment has a flag of its own.
      std::vector<int32_t> own[2] = {std::vector<int32_t>(count), std::vector<int32_t>(count)};
      for (Buffer* to : {&cpu, &device}) {
        std::vector<CopySegment> copies;
        std::vector<AccumulateSegment> sums;
        int64_t place = 0;
        const bool on_device = to == &device;
        for (const int64_t numel : numels) {
          const size_t i = copies.size();
          int32_t* flag = i % 2 == 0 ? nullptr : &own[on_device][i];
          copies.push_back({from.at(place), to->at(place), numel, flag});
          sums.push_back({from.at(place), reinterpret_cast<float*>(to->at(place)), numel, flag});
          place += numel + 3;
        }
        const auto list = on_device ? accumulate_list_cuda : host->accumulate_list;
        const auto flatten = on_device ? flatten_cuda : host->flatten;
        const Status status =
            is_sum ? list(sums.data(), count, source, 0.3F, write == Write::overwrite,
                          &flags[on_device], {})
                   : flatten(copies.data(), count, source, target, write, &flags[on_device], {});
        succeeded("list", status);
      }
      const std::string what = name("list", target, total, count);
      same(what, cpu, device);
      if (own[0] != own[1]) fail(what + ": a segment's own flag");
      if (flags[0] != flags[1]) fail(what + ": flag");
    }
  }
}

void test_cast(DType source, DType target, int64_t numel, int64_t offset, int64_t other) {
  Buffer from(source, numel, offset);
  special(from);
  Buffer cpu(target, numel, other);
  Buffer device = cpu;
  const std::string what = name("cast", source, numel, offset);
  host->cast(from.data(), source, cpu.data(), target, numel, {});
  succeeded(what, cast_cuda(from.data(), source, device.data(), target, numel, {}));
  same(what, cpu, device);
}

// Every pattern of the halves, and random patterns of float32.
void test_patterns() {
  for (const DType source : kDTypes) {
    Buffer from(source, 1 << 18, 0);
    for (int64_t i = 0; i < from.numel; ++i) {
      const auto bits = static_cast<uint32_t>(source == DType::f32 ? generator() : i);
      std::memcpy(from.at(i), &bits, element_bytes(source));
    }
    for (const DType target : kDTypes) {
      Buffer cpu(target, from.numel, 0);
      Buffer device = cpu;
      host->cast(from.data(), source, cpu.data(), target, from.numel, {});
      succeeded("patterns", cast_cuda(from.data(), source, device.data(), target, from.numel, {}));
      same(name("patterns", source, from.numel, static_cast<int64_t>(target)), cpu, device);
    }
  }
}

// A master, its compute copy with some written elements, a gradient and three moments.
struct State {
  Buffer master, param, grad, first, second, third;

  State(DType dtype, int64_t numel, int64_t offset, int64_t other)
      : master(DType::f32, numel, offset),
        param(dtype, numel, other),
        grad(DType::f32, numel, offset),
        first(DType::f32, numel, offset),
        second(DType::f32, numel, offset),
        third(DType::f32, numel, offset) {
    host->cast(master.data(), DType::f32, param.data(), dtype, numel, {});
    for (int64_t i = 5; i < numel; i += 11) param.set(i, Buffer::value());
    for (int64_t i = 0; i < numel; ++i) {
      second.floats()[i] = std::fabs(second.floats()[i]);
      third.floats()[i] = std::fabs(third.floats()[i]);
    }
  }

  void same_as(const std::string& what, State& other) {
    same(what + " master", master, other.master);
    same(what + " param", param, other.param);
    same(what + " first", first, other.first);
    same(what + " second", second, other.second);
    same(what + " third", third, other.third);
  }
};

// What OnDevice points to; `mode` 0: nothing, 1: all, not skipped, 2: skipped.
struct Late {
  int32_t skip;
  float steps_done = 16;
  float grad_factor = 0.7F;

  OnDevice pointers(int mode) {
    skip = mode == 2;
    return mode == 0 ? OnDevice{} : OnDevice{&skip, &steps_done, &grad_factor};
  }
};

void test_adam(DType dtype, int64_t numel, int64_t offset, int64_t other) {
  for (int mode = 0; mode < 12; ++mode) {
    State cpu(dtype, numel, offset, other);
    State device = cpu;
    Late late;
    for (State* state : {&cpu, &device}) {
      const AdamArgs args{.master = state->master.floats(),
                          .param = mode % 3 == 2 ? nullptr : state->param.data(),
                          .param_dtype = dtype,
                          .grad = state->grad.floats(),
                          .exp_avg = state->first.floats(),
                          .exp_avg_sq = state->second.floats(),
                          .max_exp_avg_sq = mode % 2 == 1 ? state->third.floats() : nullptr,
                          .numel = numel,
                          .lr = 1e-2,
                          .beta1 = 0.9,
                          .beta2 = 0.999,
                          .eps = 1e-8,
                          .weight_decay = 0.1,
                          .step = 1 + mode,
                          .grad_scale = 0.5F,
                          .maximize = mode == 4,
                          .decoupled = mode % 4 < 2,
                          .on_device = late.pointers(mode / 4)};
      succeeded("adam", (state == &cpu ? host->adam : adam_cuda)(args, {}));
    }
    cpu.same_as(name("adam", dtype, numel, mode), device);
  }
}

// Moments in fewer bits: two steps, so that what the first one stored is read.
struct Stored {
  Buffer first, second;                     // bf16
  std::vector<int8_t> codes;                // of both, one after the other
  std::vector<float> scales, other_scales;  // [blocks]

  Stored(int64_t numel, int64_t offset)
      : first(DType::bf16, numel, offset),
        second(DType::bf16, numel, offset),
        codes(2 * numel + 16) {
    for (int64_t i = 0; i < numel; ++i) second.set(i, std::fabs(second.get(i)));
    for (int8_t& code : codes) code = static_cast<int8_t>(generator());
    const int64_t blocks = (numel + kBlockElements - 1) / kBlockElements;
    for (int64_t i = 0; i < blocks; ++i) {
      scales.push_back(Buffer::value());
      other_scales.push_back(std::fabs(Buffer::value()));
    }
  }
};

void test_stored_moments(Moments moments, DType dtype, int64_t numel, int64_t offset,
                         int64_t other) {
  for (int mode = 0; mode < 12; ++mode) {
    State cpu(dtype, numel, offset, other);
    if (mode == 3 && numel > 0) {
      cpu.grad.set(numel / 2, std::numeric_limits<float>::infinity());
      cpu.grad.set(numel / 3, -std::numeric_limits<float>::quiet_NaN());
    }
    if (mode == 5) std::memset(cpu.grad.data(), 0, numel * sizeof(float));
    State device = cpu;
    Stored of_cpu(numel, offset);
    if (mode == 5) std::fill(of_cpu.codes.begin(), of_cpu.codes.end(), 0);
    Stored of_device = of_cpu;
    Late late;
    for (const bool on_cpu : {true, false}) {
      State& state = on_cpu ? cpu : device;
      Stored& stored = on_cpu ? of_cpu : of_device;
      const bool in_codes = moments == Moments::int8;
      void* const codes = stored.codes.data() + offset % 4;
      for (const int64_t step : {1 + mode, 2 + mode}) {
        const AdamArgs args{
            .master = state.master.floats(),
            .param = mode % 3 == 2 ? nullptr : state.param.data(),
            .param_dtype = dtype,
            .grad = state.grad.floats(),
            .moments = moments,
            .exp_avg = in_codes ? codes : stored.first.data(),
            .exp_avg_sq = in_codes ? stored.codes.data() + offset % 4 + (numel + 3) / 4 * 4
                                   : static_cast<void*>(stored.second.data()),
            .exp_avg_scale = in_codes ? stored.scales.data() : nullptr,
            .exp_avg_sq_scale = in_codes ? stored.other_scales.data() : nullptr,
            .numel = numel,
            .lr = 1e-2,
            .beta1 = 0.9,
            .beta2 = 0.999,
            .eps = 1e-8,
            .weight_decay = 0.1,
            .step = step,
            .grad_scale = 0.5F,
            .maximize = mode == 4,
            .decoupled = mode % 4 < 2,
            .on_device = late.pointers(mode / 4)};
        succeeded("adam", (on_cpu ? host->adam : adam_cuda)(args, {}));
      }
    }
    const std::string what = name("adam, stored moments", dtype, numel, mode);
    cpu.same_as(what, device);
    same(what + " exp_avg", of_cpu.first, of_device.first);
    same(what + " exp_avg_sq", of_cpu.second, of_device.second);
    if (of_cpu.codes != of_device.codes) fail(what + " codes");
    const auto bytes = of_cpu.scales.size() * sizeof(float);
    if (bytes > 0 &&
        (std::memcmp(of_cpu.scales.data(), of_device.scales.data(), bytes) != 0 ||
         std::memcmp(of_cpu.other_scales.data(), of_device.other_scales.data(), bytes) != 0)) {
      fail(what + " scales");
    }
  }
}

// Ranges of an update, with empty ones, gaps between them, and more than one launch holds. `block`:
// states begin at its multiples.
std::vector<UpdateSegment> update_list(int64_t count, int64_t block) {
  std::vector<UpdateSegment> list;
  UpdateSegment next{3, 0, 0};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t longest = count == 5 ? 5000 : count > 100 ? 12 : 700;
    next.numel = i % 7 == 3 ? 0 : static_cast<int64_t>(generator() % longest);
    list.push_back(next);
    next.begin += next.numel + i % 3;
    if (count == 5) next.begin = (next.begin + 7) / 8 * 8;  // vectors fit
    next.states += (next.numel + block - 1) / block * block;
  }
  return list;
}

// A list's bits are those of one call for each of its ranges, on the CPU and on the device.
void test_adam_lists(DType dtype, Moments moments) {
  const bool in_codes = moments == Moments::int8;
  for (const int64_t count : {1, 5, 64, 65, 900}) {
    const std::vector<UpdateSegment> list = update_list(count, in_codes ? kBlockElements : 1);
    const int64_t numel = list.back().begin + list.back().numel;
    const int64_t states = list.back().states + list.back().numel;
    for (int mode = 0; mode < 6; ++mode) {
      State state(dtype, std::max(numel, states), 0, 0);
      Stored stored(states, 0);
      std::vector<State> results(3, state);
      std::vector<Stored> moments_of(3, stored);
      Late late;
      for (int way = 0; way < 3; ++way) {  // one by one, list, list on the device
        State& own = results[way];
        Stored& own_moments = moments_of[way];
        AdamArgs args{.master = own.master.floats(),
                      .param = mode % 3 == 2 ? nullptr : own.param.data(),
                      .param_dtype = dtype,
                      .grad = own.grad.floats(),
                      .moments = moments,
                      .lr = 1e-2,
                      .beta1 = 0.9,
                      .beta2 = 0.999,
                      .eps = 1e-8,
                      .weight_decay = 0.1,
                      .step = 3,
                      .decoupled = mode % 2 == 0,
                      .on_device = late.pointers(mode / 2)};
        if (moments == Moments::f32) {
          args.exp_avg = own.first.floats();
          args.exp_avg_sq = own.second.floats();
          if (mode % 2 == 1) args.max_exp_avg_sq = own.third.floats();
        } else {
          args.exp_avg =
              in_codes ? own_moments.codes.data() : static_cast<void*>(own_moments.first.data());
          args.exp_avg_sq = in_codes ? own_moments.codes.data() + (states + 3) / 4 * 4
                                     : static_cast<void*>(own_moments.second.data());
          args.exp_avg_scale = in_codes ? own_moments.scales.data() : nullptr;
          args.exp_avg_sq_scale = in_codes ? own_moments.other_scales.data() : nullptr;
        }
        for (const UpdateSegment& segment : list) {
          args.segments = way == 0 ? &segment : list.data();
          args.count = way == 0 ? 1 : count;
          succeeded("adam list", (way == 2 ? adam_cuda : host->adam)(args, {}));
          if (way != 0) break;
        }
      }
      const std::string what = name("adam list", dtype, count, mode);
      for (int way = 1; way < 3; ++way) {
        results[0].same_as(what, results[way]);
        same(what + " exp_avg", moments_of[0].first, moments_of[way].first);
        same(what + " exp_avg_sq", moments_of[0].second, moments_of[way].second);
        if (moments_of[0].codes != moments_of[way].codes) fail(what + " codes");
        for (auto scales : {&Stored::scales, &Stored::other_scales}) {
          const auto& expected = moments_of[0].*scales;
          const auto bytes = expected.size() * sizeof(float);
          if (bytes > 0 &&
              std::memcmp(expected.data(), (moments_of[way].*scales).data(), bytes) != 0)
            fail(what + " scales");
        }
      }
    }
  }
}

void test_sgd_lists(DType dtype) {
  for (const int64_t count : {1, 5, 65}) {
    const std::vector<UpdateSegment> list = update_list(count, 1);
    const int64_t numel = list.back().begin + list.back().numel;
    std::vector<State> results(3, State(dtype, numel, 0, 0));
    for (int way = 0; way < 3; ++way) {  // one by one, list, list on the device
      State& own = results[way];
      SgdArgs args{.master = own.master.floats(),
                   .param = own.param.data(),
                   .param_dtype = dtype,
                   .grad = own.grad.floats(),
                   .momentum_buffer = own.first.floats(),
                   .lr = 1e-2,
                   .momentum = 0.9};
      for (const UpdateSegment& segment : list) {
        args.segments = way == 0 ? &segment : list.data();
        args.count = way == 0 ? 1 : count;
        succeeded("sgd list", (way == 2 ? sgd_cuda : host->sgd)(args, {}));
        if (way != 0) break;
      }
    }
    for (int way = 1; way < 3; ++way)
      results[0].same_as(name("sgd list", dtype, count, 0), results[way]);
  }
}

void test_sgd(DType dtype, int64_t numel, int64_t offset, int64_t other) {
  for (int mode = 0; mode < 12; ++mode) {
    State cpu(dtype, numel, offset, other);
    State device = cpu;
    Late late;
    late.steps_done = mode % 2;
    for (State* state : {&cpu, &device}) {
      const SgdArgs args{.master = state->master.floats(),
                         .param = mode % 3 == 2 ? nullptr : state->param.data(),
                         .param_dtype = dtype,
                         .grad = state->grad.floats(),
                         .momentum_buffer = state->first.floats(),
                         .numel = numel,
                         .lr = 1e-2,
                         .momentum = mode % 4 == 3 ? 0 : 0.9,
                         .dampening = 0.1,
                         .weight_decay = 0.1,
                         .nesterov = mode % 2 == 1,
                         .first = mode == 2,
                         .grad_scale = 0.5F,
                         .maximize = mode == 4,
                         .on_device = late.pointers(mode / 4)};
      succeeded("sgd", (state == &cpu ? host->sgd : sgd_cuda)(args, {}));
    }
    cpu.same_as(name("sgd", dtype, numel, mode), device);
  }
}

void test_adopt_writes(DType dtype, int64_t numel, int64_t offset, int64_t other) {
  State cpu(dtype, numel, offset, other);
  State device = cpu;
  host->adopt_writes(cpu.param.data(), dtype, cpu.master.floats(), numel, {});
  succeeded("adopt_writes",
            adopt_writes_cuda(device.param.data(), dtype, device.master.floats(), numel, {}));
  cpu.same_as(name("adopt_writes", dtype, numel, offset), device);
}

// Every third segment holds one bad value, at its beginning, in its middle or at its end.
void test_find_nonfinite(int64_t numel, int64_t offset) {
  for (const int64_t count : {1, 5, 70, 1000}) {
    if (count * numel > 2000000) continue;
    Buffer value(DType::f32, count * numel, offset);
    std::vector<int32_t> flags[2] = {std::vector<int32_t>(count), std::vector<int32_t>(count)};
    std::vector<ReadSegment> segments[2];
    std::vector<int32_t> expected(count);
    for (int64_t i = 0; i < count; ++i) {
      if (i % 3 == 0 && numel > 0) {
        const int64_t place = std::min(i % 2 * numel / 2 + i % 4 / 2 * numel, numel - 1);
        value.set(i * numel + place, i % 2 == 0 ? INFINITY : std::nanf(""));
        expected[i] = 1;
      }
      for (const int k : {0, 1}) {
        segments[k].push_back({value.floats() + i * numel, numel, &flags[k][i]});
      }
    }
    const std::string what = name("find_nonfinite", DType::f32, numel, offset);
    succeeded(what, host->find_nonfinite(segments[0].data(), count, {}));
    succeeded(what, find_nonfinite_cuda(segments[1].data(), count, {}));
    ++comparisons;
    if (flags[0] != expected || flags[1] != expected) fail(what);
  }
}

// The digits with their carries done: those of the same sum.
SquareSum carried(SquareSum sum) {
  for (int32_t k = 0; k + 1 < kSquareDigits; ++k) {
    sum[k + 1] += sum[k] >> 32;
    sum[k] &= 0xFFFFFFFF;
  }
  return sum;
}

// Values of one size; of all sizes; with infinities, NaN and tiny ones.
void test_add_squares(int64_t numel, int64_t offset) {
  for (const int mode : {0, 1, 2}) {
    Buffer value(DType::f32, numel, offset);
    if (mode == 1) {
      for (int64_t i = 0; i < numel; ++i) {
        const int exponent = static_cast<int>(generator() % 260) - 140;
        value.set(i, std::ldexp(value.get(i), exponent));
      }
    }
    if (mode == 2) special(value);
    SquareSum sums[2] = {};
    for (int32_t k = 0; k < kSquareSumLength; ++k) {
      sums[0][k] = sums[1][k] = static_cast<int64_t>(generator() % 1000);
    }
    const std::string what = name("add_squares", DType::f32, numel, offset);
    succeeded(what, host->add_squares(value.floats(), numel, &sums[0], {}));
    succeeded(what, add_squares_cuda(value.floats(), numel, &sums[1], {}));
    ++comparisons;
    if (carried(sums[0]) != carried(sums[1])) fail(what + " mode " + std::to_string(mode));
  }
}

// The digits of 2^37 elements as 2^22 times those of 2^15. Sixteen squares of the first value are
// 0.99 times a digit's base, so that no digit is small.
void test_many_squares() {
  for (const float value : {0.24874F, 1e-3F, 2.7e-6F, 1.0F}) {
    const std::vector<float> values(1 << 15, value);
    const double expected = std::ldexp(static_cast<double>(value) * value, 37);
    SquareSum sums[2] = {};
    succeeded("add_squares", host->add_squares(values.data(), std::ssize(values), &sums[0], {}));
    succeeded("add_squares", add_squares_cuda(values.data(), std::ssize(values), &sums[1], {}));
    for (SquareSum& sum : sums) {
      for (int64_t& digit : sum) digit = static_cast<int64_t>(static_cast<uint64_t>(digit) << 22);
      if (std::abs(value_of(sum) / expected - 1) > 1e-12) fail("add_squares of 2^37 elements");
      ++comparisons;
    }
  }
}

void test_clip_factor() {
  std::vector<float> values(1083);
  for (const float scale : {0.0F, 1e-20F, 0.01F, 3.0F, 1e19F, INFINITY}) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = scale * static_cast<float>(i % 7);
    SquareSum sum{};
    host->add_squares(values.data(), std::ssize(values), &sum, {});
    float norm[2];
    float factor[2];
    host->clip_factor(&sum, 2.5, &norm[0], &factor[0], {});
    clip_factor_cuda(&sum, 2.5, &norm[1], &factor[1], {});
    if (std::memcmp(&norm[0], &norm[1], 4) != 0 || factor[0] != factor[1]) fail("clip_factor");
    if (factor[0] > 1 || !(factor[0] > 0)) fail("clip_factor is no factor");
    ++comparisons;
  }
}

// Both kernels of both tables on the same words: of five ranks, as they come one after the other.
void test_words() {
  for (const bool is_cuda : {false, true}) {
    const auto show = is_cuda ? show_words_cuda : host->show_words;
    const auto await = is_cuda ? await_words_cuda : host->await_words;
    for (const uint32_t first : {0U, 7U, 0x3ffffffeU, 0xffffffffU}) {
      std::vector<uint32_t> words(5, word_of(first, 0));
      uint32_t number = first;
      int32_t failed = 0;
      const auto awaited = [&](uint32_t tag) {
        failed = 0;
        succeeded("await_words", await(words.data(), 5, &number, tag, 0, &failed, {}));
        ++comparisons;
        return failed;
      };
      if (awaited(0) != 0) fail("await_words of words that have come");
      std::vector<uint32_t*> targets;
      for (uint32_t& word : words) targets.push_back(&word);
      succeeded("show_words", show(targets.data() + 3, 2, &number, true, 2, {}));
      if (number != first + 1 || words[2] != word_of(first, 0) || words[3] != word_of(number, 2))
        fail("show_words");
      if (awaited(2) != late_word(0)) fail("await_words of a word that has not come");
      succeeded("show_words", show(targets.data(), 3, &number, false, 2, {}));
      if (number != first + 1 || awaited(2) != 0) fail("await_words of all words");
      if (awaited(1) % 2 != 0 || failed == 0) fail("await_words of another tag");
      failed = odd_word(4);
      number = first + 2;
      succeeded("await_words", await(words.data(), 5, &number, 2, int64_t{1} << 60, &failed, {}));
      if (failed != odd_word(4)) fail("await_words after a failure");
    }
    std::vector<uint32_t*> none;
    uint32_t number = 0;
    int32_t failed = 0;
    const bool all_rejected =
        show(none.data(), kMostWords + 1, &number, true, 0, {}) == Status::bad_argument &&
        show(none.data(), 0, &number, true, 4, {}) == Status::bad_argument &&
        await(nullptr, -1, &number, 0, 0, &failed, {}) == Status::bad_argument;
    if (!all_rejected) fail("words out of range");
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void compare(const Kernels* of_the_cpu) {
  host = of_the_cpu;
  test_words();
  test_many_squares();
  test_clip_factor();
  test_patterns();
  for_shapes(kLengths, [](int64_t n, int64_t offset, int64_t) { test_add_squares(n, offset); });
  for_shapes(kLengths, [](int64_t n, int64_t offset, int64_t) { test_find_nonfinite(n, offset); });
  for (const DType dtype : kDTypes) {
    for_shapes(kLengths, [&](int64_t n, int64_t a, int64_t b) { test_accumulate(dtype, n, a, b); });
    for_shapes(kShort,
               [&](int64_t n, int64_t a, int64_t b) { test_accumulate_ranks(dtype, n, a, b); });
    for_shapes(kShort, [&](int64_t n, int64_t a, int64_t b) { test_adam(dtype, n, a, b); });
    for (const Moments moments : {Moments::bf16, Moments::int8}) {
      for_shapes(kShort, [&](int64_t n, int64_t a, int64_t b) {
        test_stored_moments(moments, dtype, n, a, b);
      });
    }
    for (const Moments moments : {Moments::f32, Moments::bf16, Moments::int8}) {
      test_adam_lists(dtype, moments);
    }
    test_sgd_lists(dtype);
    for_shapes(kShort, [&](int64_t n, int64_t a, int64_t b) { test_sgd(dtype, n, a, b); });
    for_shapes(kLengths,
               [&](int64_t n, int64_t a, int64_t b) { test_adopt_writes(dtype, n, a, b); });
    for (const DType target : kDTypes) {
      for_shapes(kLengths,
                 [&](int64_t n, int64_t a, int64_t b) { test_cast(dtype, target, n, a, b); });
      for (const Write write : {Write::overwrite, Write::add}) test_lists(dtype, target, write);
    }
  }
  std::printf("%lld comparisons, all equal\n", static_cast<long long>(comparisons));
  std::fflush(stdout);
}
