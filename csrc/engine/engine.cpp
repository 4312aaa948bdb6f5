#include "engine/engine.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/errors.h"
#include "gather/shutdown_handshake.h"

namespace zero_ext {
namespace {

// For the last messages of an engine: longer than ranks of the same step are apart, shorter than
// what a launcher gives ranks that it ends.
constexpr std::chrono::seconds kLastMessages(20);
// Other ranks may delete their engine later, or never: the process waits for this at its exit.
constexpr std::chrono::seconds kOtherRanks(5);

SlotSpec slot_spec(const std::string& name, const at::Tensor& parameter) {
  // A dense layout is kept as it is (channels_last, transposed), anything else becomes row-major.
  std::vector<int64_t> strides = parameter.strides().vec();
  if (!parameter.is_non_overlapping_and_dense()) {
    int64_t step = 1;
    for (int64_t d = parameter.dim() - 1; d >= 0; --d) {
      strides[d] = step;
      step *= std::max<int64_t>(parameter.size(d), 1);
    }
  }
  return {.name = name,
          .sizes = parameter.sizes().vec(),
          .strides = strides,
          .numel = parameter.numel()};
}

}  // namespace

Engine::Engine(EngineOptions options)
    : parts_(std::move(options)),
      forwards_(parts_),
      backward_(parts_, forwards_),
      values_(parts_, backward_),
      changes_(parts_, backward_, values_),
      steps_(parts_, backward_) {}

std::shared_ptr<Engine> Engine::create(EngineOptions options, void (*destroy)(Engine*)) {
  std::shared_ptr<Engine> engine(new Engine(std::move(options)), destroy);
  engine->backward_.listen_as(std::shared_ptr<BackwardListener>(engine, &engine->backward_));
  return engine;
}

Engine::~Engine() {
  begin_shutdown();
  if (parts_.comm.is_forked()) return;
  try {
    const Access access(parts_.lock);
    parts_.context.reducing.join();
    parts_.context.gathering.join();
    // Messages of a backward that threw may never end.
    const bool threw = backward_.threw(access) || backward_.is_open(access);
    parts_.comm.finish(threw ? std::chrono::seconds(0) : kLastMessages);
    if (threw) {
      parts_.comm.groups().abort(std::chrono::seconds(0));
    } else {
      end_groups_later(parts_.comm.shared_groups(), kOtherRanks);
    }
  } catch (const std::exception&) {
    // The device is in an error.
  }
}

void Engine::begin_shutdown() noexcept {
  if (parts_.comm.is_forked()) return;
  try {
    const Access access(parts_.lock);
    if (!parts_.context.shards_parameters() || std::exchange(shutdown_begun_, true)) return;
    finish_shutdown_later(parts_.comm, parts_.gatherer.take_outstanding_sends());
  } catch (const std::exception&) {
    // The connections are broken, so that no rank can read anything, or the device is.
  }
}

void Engine::add_parameters(const std::vector<at::Tensor>& parameters,
                            const std::vector<std::string>& names) {
  TORCH_CHECK_VALUE(parameters.size() == names.size(), where(parts_.comm.global_rank()),
                    parameters.size(), " parameters have ", names.size(),
                    " names. Pass one name for each.");
  const Access access(parts_.lock);
  for (size_t i = 0; i < parameters.size(); ++i) {
    parts_.published.add();
    parts_.parameters.add(parameters[i], names[i]);
  }
}

int64_t Engine::add_unit(const std::vector<int64_t>& members, at::ScalarType dtype, UnitKind kind) {
  const Access access(parts_.lock);
  const at::NoGradGuard no_grad;
  const std::vector<int64_t> unfrozen = forwards_.frozen_units_of(access, members);
  parts_.gatherer.hold(unfrozen);
  std::unique_ptr<Unit> unit;
  try {
    unit = make_unit(members, dtype, kind);
  } catch (...) {
    parts_.gatherer.drop(unfrozen, Writes::discard);
    throw;
  }
  parts_.parameters.add_unit(std::move(unit), kind, members);
  parts_.reductions.reserve_messages();
  const int64_t number = forwards_.add_unit(access, kind, unfrozen);
  parts_.gatherer.drop(unfrozen, Writes::discard);
  return number;
}

std::unique_ptr<Unit> Engine::make_unit(const std::vector<int64_t>& members, at::ScalarType dtype,
                                        UnitKind kind) {
  const bool trainable = kind != UnitKind::frozen;
  const ShardedParameters& parameters = parts_.parameters;
  std::vector<SlotSpec> specs;
  std::vector<at::Tensor> values;
  const bool experts = !members.empty() && parameters[members.front()].is_expert;
  for (const int64_t i : members) {
    TORCH_CHECK(parameters[i].is_expert == experts, where(parts_.comm.global_rank()),
                "parameters '", parameters[members.front()].name, "' and '", parameters[i].name,
                "' lie on different ranks, and cannot be in one unit.");
    specs.push_back(slot_spec(parameters[i].name, parameters[i].local));
    values.push_back(parameters[i].local.detach());
  }
  const auto index = std::ssize(trainable ? parameters.units() : parameters.frozen_units());
  TORCH_CHECK(index < kMaxUnits, where(parts_.comm.global_rank()), "more than ", kMaxUnits,
              " units. Choose a larger bucket_mb.");
  const std::string name =
      members.size() == 1 ? specs.front().name : specs.front().name + " … " + specs.back().name;
  NanRecords& records = parts_.nan_records;
  auto unit =
      std::make_unique<Unit>(parts_.ranks_of(experts), index, trainable ? records.count() : 0, name,
                             std::move(specs), values, dtype, kind, parts_.options.broadcast);
  if (trainable) records.add(members);
  return unit;
}

void Engine::replace_parameter(int64_t i, const at::Tensor& tensor) {
  const Access access(parts_.lock);
  parts_.parameters.replace(i, tensor);
}

void Engine::set_local(int64_t i, const at::Tensor& local, int64_t norm_row, bool is_expert) {
  const Access access(parts_.lock);
  parts_.parameters[i].local = local;
  parts_.parameters[i].norm_row = norm_row;
  parts_.parameters[i].is_expert = is_expert;
}

void Engine::set_to_local(PublishedGradients::ToLocal to_local) {
  const Access access(parts_.lock);
  parts_.published.set_to_local(std::move(to_local));
}

void Engine::set_across_meshes(AcrossMeshes across) {
  const Access access(parts_.lock);
  parts_.agreement.set_across_meshes(std::move(across));
}

std::vector<int64_t> Engine::unfrozen() const {
  const Access access(parts_.lock);
  return unfrozen_among(parameters());
}

std::map<std::string, int64_t> Engine::stats() {
  const Access access(parts_.lock);
  std::map<std::string, int64_t> stats{
      {"backwards", backward_.count()},
      {"reductions", parts_.reductions.started()},
      {"gathers", steps_.counts().gathers + parts_.gatherer.gathers()},
      {"steps", steps_.counts().updates},
      {"gathers_between_hosts", parts_.gatherer.gathers_between_hosts()},
      {"bytes_to_hosts", steps_.counts().bytes_to_hosts},
      {"units", parameters().unit_count()},
      {"neighbors", parts_.comm.local_peers()},
      {"same_host", parts_.comm.way().one_host ? 1 : 0},
      {"reduced_in_no_sync", backward_.reduced_in_no_sync()}};
  stats["served_backwards"] = 0;
  for (const auto& [rank, served] : steps_.served()) {
    stats["served_backwards"] += served.backwards;
    stats["served_us_rank_" + std::to_string(rank)] = served.time.count();
  }
  for (const auto& [rank, time] : parts_.comm.waited()) {
    const std::string whom =
        rank == Pending::kAllRanks ? "all_ranks" : "rank_" + std::to_string(rank);
    stats["waited_us_" + whom] =
        std::chrono::duration_cast<std::chrono::microseconds>(time).count();
  }
  for (size_t held = 0; held < kHeldNames.size(); ++held) {
    stats["bytes_" + std::string(kHeldNames[held])] =
        context().memory->bytes(static_cast<Held>(held));
  }
  stats["bytes_offloaded"] = context().offloaded->total();
  stats["bytes_held"] = context().memory->total();
  stats["bytes_peak"] = context().memory->peak();
  return stats;
}

}  // namespace zero_ext
