#include "comm/stalled_ranks.h"

#include <algorithm>
#include <exception>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

namespace zero_ext {
namespace {

// The first letter of what a rank publishes.
constexpr char kGoesOn = '-';
constexpr char kWaits = 'w';
constexpr char kKnows = 'k';  // it waits, and has read that all ranks do

constexpr size_t kNamed = 4;  // of a list of ranks

}  // namespace

std::string list_of_ranks(const std::vector<int64_t>& ranks) {
  std::string list;
  for (size_t k = 0; k < std::min(ranks.size(), kNamed); ++k)
    list += (k > 0 ? ", " : "") + std::to_string(ranks[k]);
  if (ranks.size() > kNamed) list += " and " + std::to_string(ranks.size() - kNamed) + " more";
  return list;
}

StalledRanks::StalledRanks(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t world,
                           std::function<int64_t(int64_t)> global_rank)
    : store_(std::move(store)), rank_(rank), global_rank_(std::move(global_rank)) {
  for (int64_t r = 0; r < world; ++r) keys_.push_back("zero_ext/stalled/" + std::to_string(r));
}

StalledRanks::~StalledRanks() = default;

std::string StalledRanks::exchange(const std::string& what) {
  if (store_ == nullptr || (what.empty() && value_.empty())) return {};
  try {
    // Another thread may wait in the group's own one.
    if (!std::exchange(is_own_, true)) store_ = store_->clone();
    const bool knew = !found_.empty() && value_ == kKnows + what;
    if (!knew) publish(what.empty() ? std::string(1, kGoesOn) : kWaits + what);
    const std::vector<std::string> values = published();
    std::string found = described(values);
    if (!found.empty() && !knew) publish(kKnows + what);
    if (found.empty() && knew) publish(kWaits + what);
    found_ = std::move(found);
    const bool all_know = std::all_of(values.begin(), values.end(),
                                      [](const auto& value) { return value.front() == kKnows; });
    return all_know ? found_ : std::string();
  } catch (const std::exception&) {
    // The process with the store's server may have ended, after it knew.
    store_ = nullptr;
    return std::exchange(found_, {});
  }
}

void StalledRanks::publish(const std::string& value) {
  if (value == value_) return;
  store_->set(keys_[rank_], value);
  value_ = value;
}

std::vector<std::string> StalledRanks::published() {
  std::vector<std::string> values;
  if (!store_->check(keys_)) return values;
  if (store_->hasExtendedApi()) {
    for (const auto& bytes : store_->multiGet(keys_))
      values.emplace_back(bytes.begin(), bytes.end());
  } else {
    for (const std::string& key : keys_) values.push_back(store_->get_to_str(key));
  }
  return values;
}

std::string StalledRanks::described(const std::vector<std::string>& values) const {
  std::vector<std::pair<std::string, std::vector<int64_t>>> groups;  // of ranks with the same text
  for (int64_t r = 0; r < std::ssize(values); ++r) {
    if (values[r].front() == kGoesOn) return {};
    const std::string text = values[r].substr(1);
    const auto same = std::find_if(groups.begin(), groups.end(),
                                   [&](const auto& group) { return group.first == text; });
    if (same == groups.end()) {
      groups.push_back({text, {global_rank_(r)}});
    } else {
      same->second.push_back(global_rank_(r));
    }
  }
  if (groups.size() < 2) return {};
  std::string all;
  for (const auto& [text, ranks] : groups) {
    all += (all.empty() ? "rank " : "; rank ") + list_of_ranks(ranks) + " " + text;
  }
  return all;
}

}  // namespace zero_ext
