"""Muon, sharded: the momentum is flat and sharded, and each matrix is orthogonalised by its owner.

Note [Muon]
torch.optim.Muon rounds a matrix to bf16 before its iteration, and the iteration's result is in
bf16. So the rounded elements are all that an owner has to get, and the result all that it has to
send: 2 bytes per element each way, with torch's bits. All else is elementwise, and each rank does
it for the elements that it holds. Where every rank holds everything, the owners share the work, and
only results travel.

While an owner works on one wave of matrices, the next one is on its way to it, and the results of
the last one are on their way back.
"""

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import _muon

from zero_ext.engine.checks import check_positive
from zero_ext.engine.registry import find
from zero_ext.optim.core import Core
from zero_ext.optim.fused import Fused
from zero_ext.optim.groups import Group, name_in_module
from zero_ext.optim.owners import OWNER_MB, Owners, Values, Wave
from zero_ext.optim.states import Layout
from zero_ext.ranks.owner_plan import newton_schulz_cost
from zero_ext.tensor.meshes import Outer, is_cut, is_cut_over, local_of, reject_cut

# The bytes of each element of an owner's matrices: the input of the iteration, and its result.
_ELEMENT_BYTES = 2 * torch.bfloat16.itemsize

# By the index of a parameter: its group, and the shape of the matrices that it is made of.
_Stepped = dict[int, tuple[Group, torch.Size]]


class Muon(Fused, torch.optim.Muon):
    """torch.optim.Muon with sharded fp32 momentum and fp32 masters (Jordan et al. 2024).

    Arguments as in torch. See ``Sharded`` for the keyword arguments that torch does not have,
    and ``muon_groups`` for which parameters of a model to pass.

    Args:
        split: Each matrix is updated as so many matrices with equally many rows: 3 for a fused
            query, key and value. A setting of groups, as all but ``owner_mb``.
        owner_mb: Each rank iterates on the matrices that it owns. They travel in waves of so many
            MiB of matrices and results per owner; two waves are under way at a time. A larger
            matrix is a wave by itself.
    Raises:
        ValueError: a parameter is no matrix.
    """

    _zero_owner_mb, _zero_split = OWNER_MB, 1
    _zero_layout = Layout(("momentum_buffer",), lambda group: 1, counts_steps=False)

    def __init__(self, params, *args: Any, split: int = 1, owner_mb: float = OWNER_MB, **kwargs):
        check_positive("owner_mb", owner_mb)
        self._zero_owner_mb, self._zero_split = owner_mb, split
        super().__init__(params, *args, **kwargs)
        self.defaults["split"] = split

    def _zero_make_states(self, core: Core) -> None:
        super()._zero_make_states(core)
        core.in_python = True
        for group in self.param_groups:
            group.setdefault("split", 1)
        core.owners = Owners(
            core.handle,
            owner_mb=self._zero_owner_mb,
            element_bytes=_ELEMENT_BYTES,
            split_replicas=True,
        )

    def add_param_group(self, param_group: Group) -> None:
        if isinstance(param_group, dict) and isinstance(param_group.get("params"), Iterable):
            given = param_group["params"]
            if isinstance(given, Tensor | Iterator):  # which can be read once
                given = [given] if isinstance(given, Tensor) else [*given]
                param_group["params"] = given
            split = param_group.setdefault("split", self.defaults.get("split", self._zero_split))
            for each in given:
                name, parameter = each if isinstance(each, tuple) else (None, each)
                if isinstance(parameter, Tensor):  # of other objects torch tells
                    _check_matrix(name or name_in_module(parameter), parameter, split)
        super().add_param_group(param_group)

    # The step

    def _zero_update(self) -> None:
        for group in self.param_groups:
            _check_settings(group)
        core = self.zero_core
        trained = sorted(core.trained, key=operator.itemgetter(1))
        groups = [(p, i, self.param_groups[g]) for p, i, g in trained]
        matrices = {i: (group, _part_shape(p, group)) for p, i, group in groups}
        core.owners.assign(
            {i: g["split"] * newton_schulz_cost(*shape) for i, (g, shape) in matrices.items()}
        )
        try:
            self._update_in_waves({i: matrices[i] for p, i, _ in trained if p.grad is not None})
        finally:  # masters that have moved are those of their parameters, whatever was raised
            core.state.apply_masters()

    def _update_in_waves(self, stepped: _Stepped) -> None:
        core = self.zero_core
        waves = core.owners.waves([*stepped])
        like = torch.empty(0, dtype=torch.bfloat16, device=core.handle.groups.device)
        arriving = [self._send(wave, stepped) for wave in waves[:1]]
        come_back: Callable[[], Values] = dict
        for wave, following in itertools.zip_longest(waves, waves[1:]):
            arrive = arriving.pop()
            if following is not None:
                arriving.append(self._send(following, stepped))
            (flat,) = arrive()
            results = {i: self._iterate(i, each, *stepped[i]) for i, each in flat.items()}
            self._apply(come_back(), stepped)
            come_back = core.owners.from_owners(wave, results, like)
        self._apply(come_back(), stepped)

    def _send(self, wave: Wave, stepped: _Stepped) -> Callable[[], tuple[Values, ...]]:
        """Update the momentum, and send what the iteration takes."""
        core, values = self.zero_core, {}
        for indices in _alike(wave.indices, lambda i: id(stepped[i][0])).values():
            group, _ = stepped[indices[0]]
            gradients = [core.handle.engine.grad_slice(i) for i in indices]
            buffers = [core.state.slice(0, i) for i in indices]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            inputs = buffers
            if group["nesterov"]:
                inputs = torch._foreach_lerp(gradients, buffers, group["momentum"])
            for i, each in zip(indices, inputs, strict=True):
                values[i] = each.bfloat16().to(core.handle.groups.device)
        return core.owners.to_owners(wave, values)

    def _iterate(self, i: int, flat: Tensor, group: Group, part_shape: torch.Size) -> Tensor:
        """The result in the parameter's order of memory, as ``flat`` is. Collective on the other
        dimensions of a mesh that has cut the parameter."""
        handle, result = self.zero_core.handle, torch.empty_like(flat)
        parameter, strides = handle.parameters[i], handle.engine.strides(i)
        settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
        outer = Outer.of(parameter, strides) if is_cut(parameter) else None
        shape = local_of(parameter).shape
        parts = [each.as_strided(shape, strides).split(part_shape[0]) for each in (flat, result)]
        for part, place in zip(*parts, strict=True):  # one where a mesh has cut the matrix
            whole = part if outer is None else outer.present(part)
            update = _muon._zeropower_via_newtonschulz(whole, *settings)
            if outer is not None:
                update = update.redistribute(placements=outer.spec.placements).to_local()
            place.copy_(update)
        return result

    def _apply(self, updates: Values, stepped: _Stepped) -> None:
        lrs = {id(group): float(group["lr"]) for group in self.param_groups}

        def rates(i: int) -> tuple[float, float]:
            group, part_shape = stepped[i]
            lr = lrs[id(group)]
            adjusted = _muon._adjust_lr(lr, group["adjust_lr_fn"], part_shape)
            return 1 - lr * group["weight_decay"], adjusted

        for (decay, lr), indices in _alike(updates, rates).items():
            masters = [self.zero_core.handle.engine.master_slice(i) for i in indices]
            device = masters[0].device
            torch._foreach_mul_(masters, decay)
            torch._foreach_add_(masters, [updates[i].to(device) for i in indices], alpha=-lr)


def _alike(indices: Iterable[int], key: Callable[[int], Any]) -> dict[Any, list[int]]:
    """The indices by key: one call updates those with the same key."""
    found = defaultdict(list)
    for i in indices:
        found[key(i)].append(i)
    return found


def _part_shape(parameter: Tensor, group: Group) -> torch.Size:
    """The shape of the matrices that are updated each by itself."""
    rows, columns = parameter.shape
    return torch.Size((rows // group["split"], columns))


def _check_matrix(name: str | None, parameter: Tensor, split: int) -> None:
    entry = find(parameter)
    if entry is not None and is_cut_over(parameter, entry.handle.groups.expert_mesh):
        reject_cut("Muon", parameter, name, "Give experts to AdamW.")
    if split != 1:
        reject_cut(f"Muon with split={split}", parameter, name, "Leave split at 1 for it.")
    which, shape = "a parameter" if name is None else f"'{name}'", tuple(parameter.shape)
    if len(shape) != 2:
        raise ValueError(
            f"zero_ext: Muon updates matrices, and {which} has shape {shape}. Give it to AdamW: "
            "zero_ext.optim.muon_groups(model) sorts the parameters."
        )
    if not (isinstance(split, int) and split > 0 and shape[0] % split == 0):
        raise ValueError(
            f"zero_ext: {which} has {shape[0]} rows, and split={split}. Pass a number of matrices "
            "that divides the rows."
        )


def _check_settings(group: Group) -> None:
    """Raise before anything changes for what torch's iteration rejects."""
    if not group["ns_steps"] < 100:
        raise ValueError(f"zero_ext: ns_steps must be less than 100, not {group['ns_steps']}.")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(
            f"zero_ext: ns_coefficients must be three numbers, not {group['ns_coefficients']}."
        )


# The optimizer of each parameter

_Named = list[tuple[str, nn.Parameter]]


class MuonGroups(NamedTuple):
    """Named parameters for two optimizers. As a string it is a table with reasons."""

    muon: _Named
    adamw: _Named
    reasons: dict[str, str]

    def __str__(self) -> str:
        rows = [("optimizer", "parameter", "shape", "why")]
        for optimizer, named in (("Muon", self.muon), ("AdamW", self.adamw)):
            for name, p in named:
                rows.append((optimizer, name, "×".join(map(str, p.shape)), self.reasons[name]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def muon_groups(model: nn.Module) -> MuonGroups:
    """Sort the parameters of ``model``, sharded or not, for one ``Muon`` and one ``AdamW``.

    Muon gets the matrices of hidden layers. AdamW gets embeddings, the output layer, vectors,
    scalars, and tensors of three or more dimensions. An embedding is a weight of ``nn.Embedding``,
    or has "emb" in its name. The output layer is what ``get_output_embeddings()`` returns, or an
    ``nn.Linear`` with as many outputs as an ``nn.Embedding`` has rows.

    Returns:
        Lists of (name, parameter), which optimizers take. ``print`` it to see the reasons.
    """
    modules = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    embeddings = {id(p) for module in modules for p in module.parameters(recurse=False)}
    vocabularies = {module.num_embeddings for module in modules}
    of_output = getattr(model, "get_output_embeddings", lambda: None)()
    heads = [
        m
        for m in model.modules()
        if m is of_output or (isinstance(m, nn.Linear) and m.out_features in vocabularies)
    ]
    outputs = {id(p) for module in heads for p in module.parameters(recurse=False)}
    muon: _Named = []
    adamw: _Named = []
    reasons: dict[str, str] = {}
    for name, p in model.named_parameters():
        hidden = p.dim() == 2 and min(p.shape) > 1
        if id(p) in embeddings or (p.dim() > 1 and "emb" in name.lower()):
            reasons[name] = "embedding"
        elif id(p) in outputs:
            reasons[name] = "output layer"
        elif hidden:
            reasons[name] = "matrix"
        else:
            many = p.dim() > 2 and sum(n > 1 for n in p.shape) > 1
            reasons[name] = f"{p.dim()} dimensions" if many else "vector"
        (muon if reasons[name] == "matrix" else adamw).append((name, p))
    return MuonGroups(muon, adamw, reasons)
