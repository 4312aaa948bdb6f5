// torch's symmetric memory on "lagged": device memory that several processes map, as ranks do on GPUs
// with direct access to each other. Each process maps it elsewhere, and gets only pointers. As CUDA's,
// it asks for the process group of a name, and its ranks meet by torch's own exchange in the group's
// store. Before torch 2.15 that numbers its keys for the whole process.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryUtils.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>
#include <vector>

#include "runtime.h"

namespace lagged {
namespace {

namespace symmetric = c10d::symmetric_memory;

// One mapping of this process. Its end waits for the device, as CUDA's does.
struct Mapping : c10::intrusive_ptr_target {
  Mapping(int device, int file, int64_t bytes) : device(device), file(file), bytes(bytes) {
    void* const begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(begin != MAP_FAILED, "lagged: shared memory cannot be mapped");
    data = static_cast<char*>(begin);
    add_mapped(device, data, bytes);
  }
  ~Mapping() override {
    synchronize_quietly(device);
    remove_mapped(data);
    munmap(data, bytes);
    close(file);
  }
  const int device;
  const int file;
  const int64_t bytes;
  char* data = nullptr;
};
using MappingPtr = c10::intrusive_ptr<Mapping>;

struct SharedMemory final : symmetric::SymmetricMemory {
  SharedMemory(std::vector<MappingPtr> mappings, int rank)
      : mappings(std::move(mappings)), rank(rank) {}
  std::vector<void*> get_buffer_ptrs() override {
    std::vector<void*> all;
    for (const auto& mapping : mappings) all.push_back(mapping->data);
    return all;
  }
  std::vector<void*> get_signal_pad_ptrs() override { return not_here<std::vector<void*>>(); }
  void** get_buffer_ptrs_dev() override { return not_here<void**>(); }
  void** get_signal_pad_ptrs_dev() override { return not_here<void**>(); }
  size_t get_buffer_size() override { return mappings[rank]->bytes; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return not_here<void*>(); }
  void barrier(int /*channel*/, size_t /*timeout_ms*/) override { not_here<void>(); }
  void put_signal(int /*rank*/, int /*channel*/, size_t /*ms*/) override { not_here<void>(); }
  void wait_signal(int /*rank*/, int /*channel*/, size_t /*ms*/) override { not_here<void>(); }
  int get_rank() override { return rank; }
  int get_world_size() override { return static_cast<int>(mappings.size()); }
  c10::Device get_device() override {
    return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(mappings[rank]->device)};
  }
  bool world_within_direct_access() override { return true; }

  template <class T>
  static T not_here() {
    TORCH_CHECK(false, "lagged: nobody used this part of symmetric memory so far");
  }

  const std::vector<MappingPtr> mappings;  // of each rank's memory
  const int rank;
};

// Of a rank's memory.
struct Place {
  pid_t process;
  int file;
};

struct SharedAllocator final : symmetric::SymmetricMemoryAllocator {
  void* alloc(size_t size, int device, const std::optional<std::string>& /*group*/) override {
    const int file = memfd_create("lagged", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0,
                "lagged: no shared memory");
    auto mapping = c10::make_intrusive<Mapping>(device, file, static_cast<int64_t>(size));
    std::memset(mapping->data, 0xff, size);
    void* const data = mapping->data;
    const std::lock_guard lock(mutex);
    own.emplace(data, std::move(mapping));
    return data;
  }
  void free(void* pointer) override {
    MappingPtr ended;  // without the lock
    const std::lock_guard lock(mutex);
    const auto at = own.find(pointer);
    ended = std::move(at->second);
    own.erase(at);
  }
  size_t get_alloc_size(void* pointer) override { return own_of(pointer)->bytes; }
  c10::intrusive_ptr<symmetric::SymmetricMemory> rendezvous(
      void* pointer, const std::optional<std::string>& group) override {
    const MappingPtr mapping = own_of(pointer);
    const auto ranks = c10d::resolve_process_group(*group);
    const int own_rank = ranks->getRank();
    const Place own_place{.process = getpid(), .file = mapping->file};
    const std::vector<Place> places =
        exchange.all_gather(ranks->getStore(), own_rank, ranks->getSize(), own_place);
    std::vector<MappingPtr> all;
    for (const Place& place : places) {
      if (std::ssize(all) == own_rank) {
        all.push_back(mapping);
        continue;
      }
      const std::string path =
          "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.file);
      const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
      TORCH_CHECK(file >= 0, "lagged: ", path, " cannot be opened");
      all.push_back(c10::make_intrusive<Mapping>(mapping->device, file, mapping->bytes));
    }
    // No descriptor may be closed before all ranks have opened it.
    exchange.barrier(ranks->getStore(), own_rank, ranks->getSize());
    return c10::make_intrusive<SharedMemory>(std::move(all), own_rank);
  }
  bool has_multicast_support(int /*device*/) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kPrivateUse1; }
  std::string name() override { return "LAGGED"; }

  MappingPtr own_of(void* pointer) {
    const std::lock_guard lock(mutex);
    return own.at(pointer);
  }
  std::mutex mutex;
  std::map<void*, MappingPtr> own;
  symmetric::StoreExchange exchange{"lagged"};
};

}  // namespace
}  // namespace lagged

LAGGED_EXPORT void lagged_share_memory() {
  c10d::symmetric_memory::register_allocator(c10::kPrivateUse1,
                                             c10::make_intrusive<lagged::SharedAllocator>());
}
