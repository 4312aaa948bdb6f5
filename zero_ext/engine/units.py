"""How parameters are cut into units, which are reduced, stepped and gathered together."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

# What `shard(units=)` takes: module classes, or a predicate of a module's name and itself.
Choice = type | Collection[type] | Callable[[str, nn.Module], bool] | None


class UnitPlan(NamedTuple):
    """Parameter indices of one unit, in registration order, and the dtype they are computed in.

    ``gradient_is_fp32``: their gradients arrive and travel in fp32, whatever their own dtype.
    """

    members: list[int]
    dtype: torch.dtype
    trainable: bool = True
    gradient_is_fp32: bool = False


# A parameter that is so many times smaller than a bucket may wait for others: see Note [Reduction
# order] in csrc/reduce/reductions.h.
_SMALL = 64


def named_modules(root: nn.Module, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """As torch's, which takes several frames of Python for each module and each level above it."""
    found, seen, left = [], set(), [("", root)]
    while left:
        name, module = left.pop()
        if remove_duplicate and module in seen:
            continue
        seen.add(module)
        found.append((name, module))
        prefix = f"{name}." if name else ""
        for key, child in reversed([*module._modules.items()]):
            if child is not None:
                left.append((prefix + key, child))
    return found


def _has_parameters(module: nn.Module) -> bool:
    for _, each in named_modules(module):
        for parameter in each._parameters.values():
            if parameter is not None:
                return True
    return False


def cut_by_size(
    numels: Sequence[int], dtypes: Sequence[torch.dtype], bucket_bytes: float
) -> list[UnitPlan]:
    """Cut parameters, in reverse registration order, into units of about ``bucket_bytes``.

    Gradients arrive roughly in reverse registration order, so units fill one after the other. A
    unit has one dtype. A parameter is never cut, so a larger one makes a larger unit. Small
    parameters at the end of a full unit, such as norms beside large weights, would keep it waiting.
    They become units of their own at the end.

    Returns:
        Units in the order in which they become complete, which is the order of reductions.
    """
    sizes = [numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)]
    large, small = [], []
    for dtype in dict.fromkeys(reversed(dtypes)):
        members = [i for i in reversed(range(len(sizes))) if dtypes[i] == dtype]
        *full, last = _filled(members, sizes, bucket_bytes)
        kept = [_without_small_end(unit, sizes, bucket_bytes) for unit in full]
        left = [i for unit, most in zip(full, kept, strict=True) for i in unit[len(most) :]]
        kept.append(_without_small_end(last, sizes, bucket_bytes) if left else last)
        left += last[len(kept[-1]) :]
        large += filter(None, kept)
        small += _filled(left, sizes, bucket_bytes)
    large.sort(key=lambda unit: unit[-1], reverse=True)
    return [UnitPlan(unit[::-1], dtypes[unit[0]]) for unit in (*large, *small)]


def _filled(members: Sequence[int], sizes: Sequence[int], limit: float) -> list[Sequence[int]]:
    """``members`` cut into runs of ``sizes`` within ``limit``."""
    return [members[begin:end] for begin, end in _merged([sizes[i] for i in members], limit)]


def _without_small_end(
    members: Sequence[int], sizes: Sequence[int], bucket_bytes: float
) -> Sequence[int]:
    """Without the last ones, as many as are small together."""
    kept, taken_bytes = len(members), 0
    while kept > 0 and (taken_bytes + sizes[members[kept - 1]]) * _SMALL <= bucket_bytes:
        kept -= 1
        taken_bytes += sizes[members[kept]]
    return members[:kept]


class Block(NamedTuple):
    """Modules whose parameters are gathered and released together.

    The modules are in the order in which they are entered. ``members``: the parameters' indices, in
    registration order. ``root``: the module is the sharded one itself.
    """

    modules: list[nn.Module]
    members: list[int]
    root: bool = False


def cut_by_module(
    root: nn.Module,
    parameters: Sequence[Tensor],
    choice: Choice,
    bucket_bytes: float,
    param_dtype: torch.dtype | None = None,
) -> list[Block]:
    """Cut ``parameters`` of ``root`` by the modules that they belong to.

    A parameter goes with the innermost chosen module. One that several chosen modules share, or
    that is in none, goes with the root, or with the models in a root that has no forward. Chosen
    neighbours in one container are merged up to ``bucket_bytes``, into blocks of about the same
    size: the next block then reuses the memory of a released one.

    Returns:
        Blocks in the order in which a backward completes them. The root's, with all other
        parameters, is the last and may be empty.
    Raises:
        ValueError, TypeError: ``choice`` chooses nothing, or is no ``Choice``.
    """
    chosen = _chosen(root, choice)
    owned = _owned(root, parameters, chosen)
    # The child of a list in which a chosen module lies.
    items = dict(_repeated(root, "")) if choice is None else {}
    everything = dict(named_modules(root, remove_duplicate=False))
    of_items = {name: everything[name] for name in items.values()}
    strangers = _strangers_before(root, chosen | of_items)
    blocks: list[Block] = []
    # Chosen modules that may be merged, by their place; those of one item are one entry.
    runs: list[list[tuple[list[nn.Module], list[int]]]] = []
    last_place = last_item = None
    for name, module in chosen.items():
        members = owned.pop(name, [])
        if not members:
            continue
        item = items.get(name, name)
        place = (item.rpartition(".")[0], strangers[item])
        if place != last_place:
            runs.append([])
        if place == last_place and item == last_item:
            runs[-1][-1][0].append(module)
            runs[-1][-1][1].extend(members)
        else:
            runs[-1].append(([module], members))
        last_place, last_item = place, item
    for run in runs:
        sizes = [bytes_of(members, parameters, param_dtype) for _, members in run]
        for begin, end in _merged_evenly(sizes, bucket_bytes):
            modules = [module for entry, _ in run[begin:end] for module in entry]
            blocks.append(Block(modules, sorted(i for _, m in run[begin:end] for i in m)))
    rest = owned.pop("", [])
    everything = range(len(parameters))
    small = bytes_of(everything, parameters, param_dtype) <= bucket_bytes
    if choice is None and small and not isinstance(root, _WITHOUT_FORWARD):
        return [Block([root], list(everything), root=True)]
    of_models = _by_models(root, rest, parameters)
    kept = {i for block in of_models for i in block.members}
    rest = [i for i in rest if i not in kept]
    return [*reversed(blocks), *reversed(of_models), Block([root], rest, root=True)]


def modules_of_units(
    root: nn.Module, parameters: Iterable[Tensor], choice: Choice
) -> list[nn.Module]:
    """The chosen modules that have some of ``parameters``, whether units are merged or not.

    Raises:
        ValueError, TypeError: ``choice`` chooses nothing, or is no ``Choice``.
    """
    ids = {id(p) for p in parameters}
    modules = {id(m): m for m in _chosen(root, choice).values()}  # one may have several names
    return [m for m in modules.values() if any(id(p) in ids for p in m.parameters())]


def _by_models(root: nn.Module, rest: Sequence[int], parameters: Sequence[Tensor]) -> list[Block]:
    """Blocks for parameters of a root that is never called: one for each model in it, and one for
    each set of models that share some."""
    models = [root.get_submodule(name) for name in _called_alone(root, "")]
    has = [{id(p) for p in model.parameters()} for model in models]
    users = {i: tuple(k for k, ids in enumerate(has) if id(parameters[i]) in ids) for i in rest}
    return [
        Block([models[k] for k in which], [i for i in rest if users[i] == which])
        for which in dict.fromkeys(filter(None, users.values()))
    ]


def _merged(sizes: Sequence[int], limit: float) -> list[tuple[int, int]]:
    """Begins and ends of runs of neighbours, each within ``limit``."""
    merged, held = [], 0.0
    for i, size in enumerate(sizes):
        if merged and held + size <= limit:
            merged[-1] = (merged[-1][0], i + 1)
            held += size
        else:
            merged.append((i, i + 1))
            held = size
    return merged


def _merged_evenly(sizes: Sequence[int], limit: float) -> list[tuple[int, int]]:
    """As many runs as ``limit`` needs, whose largest one of several members is as small as
    possible."""
    count = len(_merged(sizes, limit))
    if count == 1:
        return [(0, len(sizes))]
    low, high = max((size for size in sizes if size <= limit), default=0), int(limit)
    while low < high:
        middle = (low + high) // 2
        if len(_merged(sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _merged(sizes, high)


_UNITS_EXAMPLE = (
    "Pass module classes, such as units=nn.TransformerEncoderLayer, or a function of a module's "
    "name and the module."
)


def _described(value: object) -> str:
    """Without the text of a module, which may have many lines."""
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}, not its class"
    return repr(value) if isinstance(value, (str, type)) else f"a {type(value).__name__}"


def _chosen(root: nn.Module, choice: Choice) -> dict[str, nn.Module]:
    if choice is None:
        chosen = {*dict(_repeated(root, "")), *_called_alone(root, "")}
        modules = named_modules(root, remove_duplicate=False)
        return {name: module for name, module in modules if name in chosen}
    if isinstance(choice, (type, Collection)) and not isinstance(choice, str):
        classes = (choice,) if isinstance(choice, type) else tuple(choice)
        for each in classes:
            if not isinstance(each, type) or not issubclass(each, nn.Module):
                raise TypeError(f"zero_ext: units holds {_described(each)}. {_UNITS_EXAMPLE}")
        chosen = {n: m for n, m in named_modules(root) if n and isinstance(m, classes)}
    elif callable(choice) and not isinstance(choice, nn.Module):
        chosen = {n: m for n, m in named_modules(root) if n and choice(n, m)}
    else:
        raise TypeError(f"zero_ext: units is {_described(choice)}. {_UNITS_EXAMPLE}")
    if not chosen:
        raise ValueError(
            f"zero_ext: units={choice!r} chooses no module of {type(root).__name__}; it has "
            f"{', '.join(sorted({type(m).__name__ for m in root.modules()}))}."
        )
    return chosen


_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _called_alone(module: nn.Module, prefix: str) -> Iterator[str]:
    """The models in a root that is never called itself, and so would never gather for them."""
    for name, child in module.named_children() if isinstance(module, _WITHOUT_FORWARD) else ():
        name = f"{prefix}.{name}" if prefix else name
        if isinstance(child, _WITHOUT_FORWARD):
            yield from _called_alone(child, name)
        else:
            yield name


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """The units in the outermost ModuleLists and Sequentials that hold more than one, each with the
    child of the list in which it lies.

    Mostly it is that child. A child without a forward is never called: what is called in it is
    gathered together.
    """
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        found = list(_called_children(module, prefix))
        if len(found) > 1:
            yield from found
            return
    for name, child in module.named_children():
        yield from _repeated(child, f"{prefix}.{name}" if prefix else name)


def _called_children(module: nn.Module, prefix: str, item: str = "") -> Iterator[tuple[str, str]]:
    """The outermost modules in ``module`` that have a forward and parameters, each with its item:
    the child of the innermost list in which it lies."""
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for name, child in module.named_children():
        name = f"{prefix}.{name}" if prefix else name
        if not _has_parameters(child):
            continue
        its_item = name if is_list else item
        if _has_forward(child):
            yield name, its_item
        else:
            yield from _called_children(child, name, its_item)


def _has_forward(module: nn.Module) -> bool:
    for attributes in (vars(module), *map(vars, type(module).__mro__)):
        if "forward" in attributes:
            return attributes["forward"] is not nn.Module.__dict__["forward"]
    return False


def largest_of_many(
    blocks: Sequence[Block], parameters: Sequence[Tensor], param_dtype: torch.dtype | None
) -> tuple[Block, float] | None:
    """A block of several modules that holds more than half of all bytes, and its share."""
    sizes = [bytes_of(block.members, parameters, param_dtype) for block in blocks]
    largest = max(range(len(blocks)), key=sizes.__getitem__)
    share = sizes[largest] / max(sum(sizes), 1)
    held = {id(parameters[i]) for i in blocks[largest].members}
    inside = {id(m): m for each in blocks[largest].modules for _, m in named_modules(each)}
    owners = sum([not held.isdisjoint(map(id, m._parameters.values())) for m in inside.values()])
    return (blocks[largest], share) if share > 0.5 and owners > 1 else None


def _owned(
    root: nn.Module, parameters: Sequence[Tensor], chosen: dict[str, nn.Module]
) -> dict[str, list[int]]:
    """Indices of the parameters by the name of the chosen module that owns them; "": the root."""
    index = {id(p): i for i, p in enumerate(parameters)}
    names = {id(module): name for name, module in chosen.items()}
    owners: dict[int, set[str]] = {}
    left = [(root, "")]
    while left:
        module, owner = left.pop()
        owner = names.get(id(module), owner)
        for parameter in module._parameters.values():
            if id(parameter) in index:
                owners.setdefault(index[id(parameter)], set()).add(owner)
        left += [(child, owner) for child in module._modules.values() if child is not None]
    owned: dict[str, list[int]] = {}
    for i in range(len(parameters)):
        mine = owners[i]
        owned.setdefault(mine.pop() if len(mine) == 1 else "", []).append(i)
    return owned


def _strangers_before(root: nn.Module, chosen: dict[str, nn.Module]) -> dict[str, int]:
    """How many of a chosen module's siblings come before it, have parameters and are not chosen."""
    ids = {id(module) for module in chosen.values()}
    result = {}
    for prefix, parent in named_modules(root, remove_duplicate=False):
        strangers = 0
        for key, child in parent._modules.items():
            if id(child) in ids:
                result[f"{prefix}.{key}" if prefix else key] = strangers
            elif child is not None and _has_parameters(child):
                strangers += 1
    return result


def bytes_of(
    members: Sequence[int], parameters: Sequence[Tensor], param_dtype: torch.dtype | None
) -> int:
    """In the dtype that is computed in."""
    held = [parameters[i] for i in members]
    return sum([p.numel() * (param_dtype or p.dtype).itemsize for p in held])


def parts(blocks: Sequence[Block]) -> list[tuple[int, list[int]]]:
    """Members that make units of their own, with the number of their block, in the order in which a
    backward completes them.

    The root's parameters that are registered after all other blocks, such as a head's, come first.
    In one unit with an embedding's their gradients would occupy a bucket during the whole backward.
    """
    *others, root = range(len(blocks))
    last = max((i for b in others for i in blocks[b].members), default=-1)
    late = [i for i in blocks[root].members if i > last]
    early = [i for i in blocks[root].members if i <= last]
    found = [(root, late), *((b, blocks[b].members) for b in others), (root, early)]
    return [(block, members) for block, members in found if members]


def split_block(
    members: Sequence[int], parameters: Mapping[int, Tensor], gradient_is_fp32: Container[int] = ()
) -> list[UnitPlan]:
    """The units of one block: parameters of one dtype, all trainable or all frozen, and the
    gradients of all or of none of them are in fp32."""
    kinds: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
    for i in members:
        trainable = parameters[i].requires_grad
        kind = (parameters[i].dtype, trainable, trainable and i in gradient_is_fp32)
        kinds.setdefault(kind, []).append(i)
    return [UnitPlan(part, *kind) for kind, part in kinds.items()]
