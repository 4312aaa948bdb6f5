#include "engine/rejections.h"

#include <ATen/ops/zeros.h>

#include <string>

#include "core/errors.h"

namespace zero_ext {

void Rejections::reject_uneven_unfreezing(const std::vector<int64_t>& unfrozen) const {
  const int64_t count = parameters_.size();
  const at::Tensor mine = at::zeros({count}, at::kLong);
  for (const int64_t i : unfrozen) mine[i] = 1;
  const at::Tensor all = comm_.all_gather(Comm::Agreement::unfreezing, mine, [this] {
    return where(context_.global_rank) + "waited for the other ranks' unfrozen parameters";
  });
  const auto* trained = all.const_data_ptr<int64_t>();
  for (int64_t k = count; k < all.numel(); ++k) {
    const int64_t i = k % count;
    if (trained[k] == trained[i]) continue;
    const int64_t r = k / count;
    TORCH_CHECK(false, where(context_.global_rank), "parameter '", parameters_[i].name,
                "' was frozen when it came in, and requires a gradient now on rank ",
                comm_.global_rank(trained[k] != 0 ? r : 0), " and not on rank ",
                comm_.global_rank(trained[k] != 0 ? 0 : r),
                ". Change requires_grad in the same places on every rank.");
  }
}

void Rejections::reject_written(Comm::Agreement about, const std::vector<int64_t>& indices) const {
  const std::string verb = Comm::name_of(about);
  const at::Tensor all = comm_.all_gather(about, published_.written_digests(indices), [&] {
    return where(context_.global_rank) + verb + " waited for the other ranks' " + verb;
  });
  const auto* digests = all.const_data_ptr<int64_t>();
  const int64_t count = parameters_.size();
  for (int64_t k = count; k < all.numel(); ++k) {
    const int64_t i = k % count;
    if (digests[k] == digests[i]) continue;
    const bool none_there = PublishedGradients::is_none(digests[k]);
    const int64_t with_none = comm_.global_rank(none_there ? k / count : 0);
    TORCH_CHECK(!none_there && !PublishedGradients::is_none(digests[i]),
                where(context_.global_rank, parameters_.home_of(i).name()), verb,
                ": .grad of parameter '", parameters_[i].name, "' was set to None on rank ",
                with_none, ", and not after the same backwards on rank ",
                comm_.global_rank(none_there ? 0 : k / count),
                ". Call zero_grad() on every rank and repeat the step's backwards.");
    TORCH_CHECK(false, where(context_.global_rank, parameters_.home_of(i).name()), verb,
                ": .grad of parameter '", parameters_[i].name, "' was set to other values on rank ",
                comm_.global_rank(k / count), " than on rank ", comm_.global_rank(0),
                digests[k] == 0 || digests[i] == 0 ? ", or on one of them alone" : "",
                ", or changed by other ones. zero_ext takes what you write for the average over "
                "the ranks. Add it up with"
                " all_reduce() and divide it by ",
                context_.world, " before you write it.");
  }
}

void Rejections::reject_subset(Comm::Agreement about) const {
  const std::string verb = Comm::name_of(about);
  const int64_t count = parameters_.size();
  std::vector<int64_t> held;
  for (int64_t i = 0; i < count; ++i) {
    if (parameters_[i].is_expert) held.push_back(i);
  }
  // The subset, then a digest of each gradient, then one of each value.
  const at::Tensor mine = at::zeros({1 + 2 * count}, at::kLong);
  auto* digests = mine.mutable_data_ptr<int64_t>();
  digests[0] = context_.subset;
  const at::Tensor gradients = published_.written_digests(held);
  for (const int64_t i : held) {
    digests[1 + i] = gradients.const_data_ptr<int64_t>()[i];
    digests[1 + count + i] = zero_ext::written(parameters_, i);
  }
  const at::Tensor all = comm_.all_gather(about, mine, [&] {
    return where(context_.global_rank) + verb + " waited for the other ranks' " + verb;
  });
  const auto of = [&](int64_t r, int64_t k) {
    return all.const_data_ptr<int64_t>()[r * mine.numel() + k];
  };
  for (int64_t k = 1; k < mine.numel(); ++k) {
    for (int64_t r = 1; r < context_.world; ++r) {
      int64_t first = 0;  // of its subset
      while (of(first, 0) != of(r, 0)) ++first;
      TORCH_CHECK(of(r, k) == of(first, k), where(context_.global_rank), verb, ": ",
                  k <= count ? ".grad of parameter '" : "parameter '",
                  parameters_[(k - 1) % count].name, "' was set to other values on rank ",
                  comm_.global_rank(r), " than on rank ", comm_.global_rank(first),
                  ", or on one of them alone. They hold the same experts together: write the same"
                  " values on both.");
    }
  }
}

void Rejections::reject_values(Comm::Agreement about) const {
  const std::string verb = Comm::name_of(about);
  const int64_t count = parameters_.size();
  const auto of_all = [&](const at::Tensor& mine) {
    return comm_.all_gather(about, mine, [&] {
      return where(context_.global_rank) + verb + " waited for the other ranks' " + verb;
    });
  };
  const at::Tensor mine = at::zeros({count}, at::kLong);
  auto* digests = mine.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (!parameters_[i].is_expert) digests[i] = zero_ext::written(parameters_, i);
  }
  const at::Tensor written = of_all(mine);
  const auto differ = [](const at::Tensor& all, int64_t i) {
    return !all.select(1, i).eq(all[0][i]).all().item<bool>();
  };
  for (int64_t i = 0; i < count; ++i) {
    if (!differ(written, i)) continue;
    const int64_t present = present_digest(i);  // a rank may have written what was there
    if (digests[i] == 0) digests[i] = present;
  }
  const at::Tensor all = of_all(mine);
  for (int64_t i = 0; i < count; ++i) {
    if (!differ(written, i) || !differ(all, i)) continue;
    int64_t r = 1;
    while (all[r][i].item<int64_t>() == all[0][i].item<int64_t>()) ++r;
    TORCH_CHECK(false, where(context_.global_rank, parameters_.home_of(i).name()), verb,
                ": parameter '", parameters_[i].name, "' was set to other values on rank ",
                comm_.global_rank(r), " than on rank ", comm_.global_rank(0),
                ", or on one of them alone. Every rank keeps a part of it. Write the same values on"
                " every rank: broadcast them first.");
  }
}

int64_t Rejections::present_digest(int64_t i) const {
  const ShardedParameter& parameter = parameters_[i];
  UnitParameters& home = parameters_.home_of(i).parameters();
  if (!home.comes_and_goes()) return written_of(home).digest_now(parameter.slot);
  const Unit& unit = parameters_.home_of(i);
  const at::Tensor flat =
      context_.on_device(unit.layout().slot(parameter.slot).spec.numel, unit.dtype());
  if (const Piece* own = unit.layout().own_piece(parameter.slot)) {
    flat.narrow(0, own->slot_begin, own->numel).copy_(home.present_slice(parameter.slot));
  }
  Pending pending;
  comm_.gather_parts(flat, unit.layout().bounds(parameter.slot),
                     std::vector<bool>(context_.world, true), pending);
  pending.wait([&] {
    return where(context_.global_rank, unit.name()) + "step() waited for the other ranks' parts";
  });
  return WrittenValues::digest_of(flat);
}

}  // namespace zero_ext
