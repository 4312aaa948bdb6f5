// "lagged" as PyTorch sees a device: guard (streams and events), allocators, hooks, generators.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>

#include "capture.h"
#include "runtime.h"

namespace lagged {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Device device_at(int index) { return {c10::kPrivateUse1, static_cast<DeviceIndex>(index)}; }
Stream stream_at(int device, int64_t id) { return Stream(Stream::UNSAFE, device_at(device), id); }
Queue& queue_of(const Stream& stream) { return queue(stream.device_index(), stream.id()); }

int index_of(Device device) { return device.has_index() ? device.index() : current_device(); }

int checked(int index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "there is no device lagged:", index, ", only ",
              kDevices);
  return index;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return device_at(current_device()); }
  Device exchangeDevice(Device device) const override {
    return device_at(exchange_device(checked(index_of(device))));
  }
  void setDevice(Device device) const override { exchange_device(checked(index_of(device))); }
  void uncheckedSetDevice(Device device) const noexcept override {
    exchange_device(index_of(device));
  }

  Stream getStream(Device device) const override {
    const int index = checked(index_of(device));
    return stream_at(index, current_stream(index));
  }
  Stream getDefaultStream(Device device) const override {
    return stream_at(checked(index_of(device)), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool /*high_priority*/) const override {
    const int index = checked(index_of(device));
    return stream_at(index, next_pool_stream(index));
  }
  Stream getNewStream(Device device, int /*priority*/) const override {
    const int index = checked(index_of(device));
    return stream_at(index, next_new_stream(index));
  }
  Stream exchangeStream(Stream stream) const override {
    const int index = checked(stream.device_index());
    return stream_at(index, exchange_stream(index, stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const Stream& stream) const override {
    Queue& queue = queue_of(stream);
    return queue.is_done(queue.last_ticket());
  }
  void synchronizeStream(const Stream& stream) const override {
    count_host_wait();
    queue_of(stream).wait_all();
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    count_host_wait();
    synchronize(checked(index_of({c10::kPrivateUse1, device})));
  }

  void record(void** event, const Stream& stream, const DeviceIndex /*device*/,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event();
    Event& moment = *static_cast<Event*>(*event);
    moment.queue = &queue_of(stream);
    moment.graph = capture::id_of(*moment.queue);
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      auto time_ms = std::make_shared<double>(0);
      moment.time_ms = time_ms;
      moment.ticket = moment.queue->push([time_ms] {
        *time_ms = std::chrono::duration<double, std::milli>(
                       std::chrono::steady_clock::now().time_since_epoch())
                       .count();
      });
    } else {
      moment.ticket = moment.queue->last_ticket();
    }
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    const Event& moment = *static_cast<Event*>(event);
    if (moment.queue == nullptr) return;
    capture::waited_for(moment, queue_of(stream));
    queue_of(stream).push_wait(*moment.queue, moment.ticket);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    capture::asked_by_host("asked for an event");
    const Event& moment = *static_cast<Event*>(event);
    capture::asked_for(moment);
    return moment.queue == nullptr || moment.queue->is_done(moment.ticket);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Event& moment = *static_cast<Event*>(event);
    capture::asked_for(moment);
    if (moment.queue == nullptr) return;
    if (!moment.queue->is_done(moment.ticket)) count_host_wait();  // else it would not wait
    moment.queue->wait(moment.ticket);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex /*device*/) const override {
    TORCH_CHECK(start != nullptr && end != nullptr, "both events must be recorded");
    const Event& first = *static_cast<Event*>(start);
    const Event& last = *static_cast<Event*>(end);
    TORCH_CHECK(first.time_ms && last.time_ms, "both events need enable_timing=True");
    TORCH_CHECK(queryEvent(start) && queryEvent(end), "both events must be completed");
    return *last.time_ms - *first.time_ms;
  }
  void destroyEvent(void* event, const DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override;
};

void check_memory() {
  TORCH_CHECK_WITH(OutOfMemoryError, !allocation_fails(),
                   "lagged: out of memory, as was asked for");
}

void release_context(void* context) { release(static_cast<Block*>(context)); }

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    if (bytes == 0) return {nullptr, device_at(device)};
    check_memory();
    Block* block = lagged::allocate(device, static_cast<int64_t>(bytes));
    return {block->data, block, release_context, device_at(device)};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    const int device = device_of(target);
    TORCH_CHECK(device >= 0, "the target is no memory of a lagged device");
    current_queue(device).push([=] { std::memcpy(target, source, bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    if (data.get_context() == nullptr || data.get_deleter() != release_context) return;
    record_use(static_cast<Block*>(data.get_context()), queue_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const MemoryStats memory = memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes,
                        &stats.reserved_bytes}) {
      (*bytes)[0].current = memory.allocated_bytes;
      (*bytes)[0].peak = memory.peak_bytes;
    }
    stats.allocation[0].current = memory.allocations - memory.releases;
    stats.allocation[0].allocated = memory.allocations;
    stats.allocation[0].freed = memory.releases;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex /*device*/) override {}
  void resetPeakStats(DeviceIndex device) override { reset_peak(device); }
};

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::kCPU};
    check_memory();
    Block* block = allocate_pinned(static_cast<int64_t>(bytes));
    return {block->data, block, release_context, c10::kCPU};
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool record_event(void* data, void* /*context*/, Stream stream) override {
    Block* block = pinned_block(data);
    if (block != nullptr) record_use(block, queue_of(stream));
    return block != nullptr;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    const MemoryStats memory = pinned_stats();
    at::HostStats stats;
    stats.allocated_bytes.current = memory.allocated_bytes;
    stats.allocated_bytes.peak = memory.peak_bytes;
    stats.active_bytes = stats.allocated_bytes;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const {
  device_memory.recordStream(data, stream);
}

// The numbers of a generator are the CPU's for another seed: as on a GPU, nothing depends on their
// being the CPU's for the same one.
struct Generator final : c10::GeneratorImpl {
  Generator(DeviceIndex device, at::Generator host)
      : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(~seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return ~host.current_seed(); }
  uint64_t seed() override { return ~const_cast<at::Generator&>(host).seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device_.index(), host.clone()); }

  at::Generator host;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex /*device*/) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { exchange_device(checked(device)); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(current_device());
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    if (device < 0) return -1;
    return static_cast<DeviceIndex>(exchange_device(checked(device)));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void* data) const override {
    const int device = device_of(data);
    TORCH_CHECK(device >= 0, "the pointer is no memory of a lagged device");
    return device_at(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(checked(device < 0 ? current_device() : device));
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    const int index = checked(device < 0 ? current_device() : device);
    return at::make_generator<Generator>(static_cast<DeviceIndex>(index),
                                         at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static const std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kDevices; ++i) {
      made.push_back(at::make_generator<Generator>(static_cast<DeviceIndex>(i),
                                                   at::detail::createCPUGenerator()));
    }
    return made;
  }();
  return generators.at(device);
}

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == c10::kPrivateUse1,
              "Expected a 'lagged' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "the storage is not resizable");
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = device_memory.allocate(bytes);
  const size_t kept_bytes = std::min(impl->nbytes(), bytes);
  if (kept_bytes > 0) {
    current_queue(storage.device().index())
        .push([to = data.get(), from = impl->data(), kept_bytes] {
          std::memcpy(to, from, kept_bytes);
        });
  }
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

void register_device() {
  static const Guard guard;
  static Hooks hooks;
  c10::impl::registerDeviceGuard(c10::kPrivateUse1, &guard);
  c10::SetAllocator(c10::kPrivateUse1, &device_memory);
  at::setHostAllocator(c10::kPrivateUse1, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace lagged

// A state has the bytes of torch.default_generator's.

LAGGED_EXPORT void lagged_set_seed(int device, uint64_t seed) {
  at::Generator generator = lagged::default_generator(device);
  generator.set_current_seed(seed);
}
LAGGED_EXPORT uint64_t lagged_seed(int device) {
  return lagged::default_generator(device).current_seed();
}
LAGGED_EXPORT void lagged_get_rng_state(int device, void* state) {
  const at::Tensor now = lagged::default_generator(device).get_state();
  std::memcpy(state, now.const_data_ptr(), now.nbytes());
}
LAGGED_EXPORT void lagged_set_rng_state(int device, const void* state) {
  at::Generator generator = lagged::default_generator(device);
  const at::Tensor next = generator.get_state();
  std::memcpy(next.mutable_data_ptr(), state, next.nbytes());
  generator.set_state(next);
}
