"""How parameters are cut into units, which are reduced, stepped and gathered together."""

import functools
from collections.abc import Callable, Collection, Container, Mapping, Sequence, Set
from itertools import chain, groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_ext.tensor.meshes import locals_of

# Values of `shard(units=)`: module classes, or a function of a module's name and itself, see
# ``shard``.
Choice = type | Collection[type] | Callable[[str, nn.Module], bool | str] | None
# The dtype that each parameter is computed in; None: its own.
Dtypes = Sequence[torch.dtype | None]


class Tree:
    """The modules of a model, from one walk over them.

    torch's walks take several frames of Python for each module and each level above it.

    Attributes:
        modules: At each place, in the order of ``named_modules(remove_duplicate=False)``. A module
            that several others hold has several places. The root's is 0.
        parents: The place around each place; the root's is its own.
        names: Each module once, with the name of its first place.
    """

    def __init__(self, root: nn.Module):
        self.root = root
        self.modules: list[nn.Module] = []
        self.parents: list[int] = []
        self.names: dict[nn.Module, str] = {}
        left = [("", root, 0)]
        while left:
            name, module, parent = left.pop()
            place, prefix = len(self.modules), f"{name}." if name else ""
            self.modules.append(module)
            self.parents.append(parent)
            self.names.setdefault(module, name)
            for key, child in reversed([*module._modules.items()]):
                if child is not None:
                    left.append((prefix + key, child, place))

    def owners(self, ids: Set[int]) -> dict[nn.Module, str]:
        """The modules that have one of the parameters ``ids`` themselves, with their names."""
        found = {}
        for module, name in self.names.items():
            if not ids.isdisjoint(map(id, module._parameters.values())):
                found[module] = name
        return found

    def holders(self, ids: Set[int]) -> set[nn.Module]:
        """The modules that have one of the parameters ``ids``, themselves or inside them."""
        found = set(self.owners(ids))
        for place in range(len(self.modules) - 1, 0, -1):
            if self.modules[place] in found:
                found.add(self.modules[self.parents[place]])
        return found

    @functools.cached_property
    def with_parameters(self) -> set[nn.Module]:
        ids = {id(p) for module in self.names for p in module._parameters.values()}
        return self.holders(ids - {id(None)})

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """Each once, as torch's."""
        found: dict[int, tuple[str, Tensor]] = {}
        for module, name in self.names.items():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    found.setdefault(id(buffer), (f"{name}.{key}" if name else key, buffer))
        return list(found.values())


class UnitPlan(NamedTuple):
    """Parameter indices of one unit, in registration order, and the dtype they are computed in.

    Args:
        gradient_is_fp32: Their gradients arrive and travel in fp32, whatever their own dtype.
        block: The number of the block whose modules gather them; None: they stay in memory.
    """

    members: list[int]
    dtype: torch.dtype
    trainable: bool = True
    gradient_is_fp32: bool = False
    block: int | None = None


class Block(NamedTuple):
    """Modules whose parameters are gathered and released together.

    The modules are in the order in which they are entered. ``members``: the parameters' indices, in
    registration order. ``root``: the module is the sharded one itself. ``reshards``: between
    forward and backward.
    """

    modules: list[nn.Module]
    members: list[int]
    root: bool = False
    reshards: bool = True


def cut_by_module(
    tree: Tree,
    parameters: Sequence[Tensor],
    choice: Choice,
    bucket_bytes: float,
    dtypes: Dtypes | None = None,
) -> list[Block]:
    """Cut ``parameters`` by the modules of ``tree`` that they belong to.

    A parameter goes with the innermost chosen module. One that several chosen modules share, or
    that is in none, goes with the root, or with the models in a root that has no forward. Chosen
    neighbours in one container are merged up to ``bucket_bytes``, into blocks of about the same
    size: the next block then reuses the memory of a released one. Modules with a common key are one
    block, whatever its size.

    Returns:
        Blocks in the order in which a backward completes them. The root's, with all other
        parameters, is the last and may be empty.
    Raises:
        ValueError, TypeError: ``choice`` chooses nothing, or is no ``Choice``.
    """
    sizes = bytes_of(parameters, dtypes)
    is_called = not isinstance(tree.root, _WITHOUT_FORWARD)
    if choice is None and is_called and sum(sizes) <= bucket_bytes:
        return [Block([tree.root], list(range(len(parameters))), root=True)]
    chosen, keys = _chosen(tree, choice)
    owned: dict[nn.Module, list[int]] = {}
    for i, users in enumerate(_users(tree, parameters, chosen)):
        in_one = len(users) == 1 or len({keys.get(module, module) for module in users}) == 1
        owned.setdefault(next(iter(users)) if in_one else tree.root, []).append(i)
    together: dict[str, list[nn.Module]] = {}
    for module in filter(keys.__contains__, chosen):
        together.setdefault(keys[module], []).append(module)
    blocks: list[Block] = []
    for modules in together.values():
        if members := [*chain.from_iterable([owned.get(module, ()) for module in modules])]:
            blocks.append(Block(modules, sorted(members)))
    for run in _neighbours(tree, chosen, owned.keys() - keys.keys()):
        members = [[*chain.from_iterable(map(owned.__getitem__, modules))] for modules in run]
        run_sizes = [sum(map(sizes.__getitem__, each)) for each in members]
        for begin, end in _merged_evenly(run_sizes, bucket_bytes):
            blocks.append(Block([*chain(*run[begin:end])], sorted(chain(*members[begin:end]))))
    if keys:
        order = {module: k for k, module in enumerate(chosen)}
        blocks.sort(key=lambda block: order[block.modules[0]])
    of_models = _by_models(tree, parameters, owned.get(tree.root, []))
    rest = of_models.pop((), [])
    models = [Block([*users], members) for users, members in of_models.items()]
    return [*reversed(blocks), *reversed(models), Block([tree.root], rest, root=True)]


def modules_of_units(tree: Tree, parameters: Sequence[Tensor], choice: Choice) -> list[nn.Module]:
    """The chosen modules that have some of ``parameters``, whether units are merged or not.

    Raises:
        ValueError, TypeError: ``choice`` chooses nothing, or is no ``Choice``.
    """
    holders = tree.holders({id(p) for p in parameters})
    return [module for module in _chosen(tree, choice)[0] if module in holders]


def _users(
    tree: Tree, parameters: Sequence[Tensor], chosen: Container[nn.Module]
) -> list[dict[nn.Module, None]]:
    """Of each parameter the innermost ``chosen`` modules that use it; the root is that of modules
    in none."""
    index = {id(p): i for i, p in enumerate(parameters)}
    users: list[dict[nn.Module, None]] = [{} for _ in parameters]
    innermost: list[nn.Module] = []
    for module, parent in zip(tree.modules, tree.parents, strict=True):
        innermost.append(module if module in chosen or not innermost else innermost[parent])
        for parameter in module._parameters.values():
            if (i := index.get(id(parameter))) is not None:
                users[i][innermost[-1]] = None
    return users


def _neighbours(
    tree: Tree, chosen: Mapping[nn.Module, int], owning: Container[nn.Module]
) -> list[list[list[nn.Module]]]:
    """Runs of what may be merged: of the items in one container, the ``owning`` modules in each.

    A sibling that has parameters and is not chosen ends a run. What is merged across it would be
    gathered before, and kept until after, all that lies between.
    """
    apart = {*chosen, *map(tree.modules.__getitem__, chosen.values())}
    strangers = [0] * len(tree.modules)  # that each place has had inside so far
    runs = [(0, 0)]  # of each place
    for place in range(1, len(tree.modules)):
        module, parent = tree.modules[place], tree.parents[place]
        runs.append((parent, strangers[parent]))
        strangers[parent] += module in tree.with_parameters and module not in apart
    entries = [(runs[item], item, m) for m, item in chosen.items() if m in owning]
    return [
        [[module for *_, module in entry] for _, entry in groupby(run, itemgetter(1))]
        for _, run in groupby(entries, itemgetter(0))
    ]


def _by_models(
    tree: Tree, parameters: Sequence[Tensor], rest: Sequence[int]
) -> dict[tuple[nn.Module, ...], list[int]]:
    """The parameters ``rest`` by the models that share them, in a root that is never called."""
    users = _users(tree, parameters, _models(tree))
    found: dict[tuple[nn.Module, ...], list[int]] = {}
    for i in rest:
        users[i].pop(tree.root, None)
        found.setdefault((*users[i],), []).append(i)
    return found


def merged(sizes: Sequence[int], limit: float) -> list[tuple[int, int]]:
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
    count = len(merged(sizes, limit))
    if count == 1:
        return [(0, len(sizes))]
    low, high = max((size for size in sizes if size <= limit), default=0), int(limit)
    while low < high:
        middle = (low + high) // 2
        if len(merged(sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return merged(sizes, high)


_UNITS_EXAMPLE = (
    "Pass module classes, such as units=nn.TransformerEncoderLayer, or a function of a module's "
    "name and the module."
)


def _described(value: object) -> str:
    """Without the text of a module, which may have many lines."""
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}, not its class"
    return repr(value) if isinstance(value, (str, type)) else f"a {type(value).__name__}"


def _chosen(tree: Tree, choice: Choice) -> tuple[dict[nn.Module, int], dict[nn.Module, str]]:
    """The modules that make units, in the order of their last places, each with the place of its
    item: the child of a list in which it lies. Where the user has chosen, it is its own. And the
    keys that the user has given to some."""
    keys: dict[nn.Module, str] = {}
    if choice is None:
        items = {place: place for place in _models(tree).values()} | _units_in_lists(tree)
    else:
        chosen = _chosen_by_user(tree, choice)
        items = {place: place for place, module in enumerate(tree.modules) if module in chosen}
        keys = {module: key for module, key in chosen.items() if isinstance(key, str)}
    last = {tree.modules[place]: place for place in sorted(items)}
    return {tree.modules[place]: items[place] for place in sorted(last.values())}, keys


def _chosen_by_user(tree: Tree, choice: Choice) -> dict[nn.Module, bool | str]:
    if isinstance(choice, (type, Collection)) and not isinstance(choice, str):
        classes = (choice,) if isinstance(choice, type) else tuple(choice)
        for each in classes:
            if not isinstance(each, type) or not issubclass(each, nn.Module):
                raise TypeError(f"zero_ext: units holds {_described(each)}. {_UNITS_EXAMPLE}")
        if not classes:
            return {}
        chosen = {m: True for m, name in tree.names.items() if name and isinstance(m, classes)}
    elif callable(choice) and not isinstance(choice, nn.Module):
        asked = {m: choice(name, m) for m, name in tree.names.items() if name}
        chosen = {m: answer for m, answer in asked.items() if answer}
    else:
        raise TypeError(f"zero_ext: units is {_described(choice)}. {_UNITS_EXAMPLE}")
    if not chosen:
        raise ValueError(
            f"zero_ext: units={choice!r} chooses no module of {type(tree.root).__name__}; it has "
            f"{', '.join(sorted({type(m).__name__ for m in tree.names}))}."
        )
    return chosen


_LISTS = (nn.ModuleList, nn.Sequential)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _models(tree: Tree) -> dict[nn.Module, int]:
    """The models in a root that is never called itself, and so would never gather for them, with
    their places."""
    models: dict[nn.Module, int] = {}
    never_called: list[bool] = []
    for place, (module, parent) in enumerate(zip(tree.modules, tree.parents, strict=True)):
        outermost = place == 0 or never_called[parent]
        never_called.append(outermost and isinstance(module, _WITHOUT_FORWARD))
        if outermost and place > 0 and not never_called[place]:
            models[module] = place
    return models


def _units_in_lists(tree: Tree) -> dict[int, int]:
    """The places of units in the outermost ModuleLists and Sequentials that hold more than one,
    each with that of its item, the child of the innermost list in which it lies.

    Mostly the unit is the item. A child without a forward is never called: what is called in it is
    gathered together.
    """
    is_unit: list[bool] = []
    for module in tree.modules:
        # A class of scripted modules does not let its forward be read.
        of_class = getattr(type(module), "forward", None)
        is_called = "forward" in vars(module) or of_class is not nn.Module.forward
        is_unit.append(is_called and module in tree.with_parameters)
    units = [0] * len(tree.modules)  # the outermost ones in each place
    for place in range(len(tree.modules) - 1, 0, -1):
        units[tree.parents[place]] += 1 if is_unit[place] else units[place]
    found: dict[int, int] = {}
    items: dict[int, int] = {}  # of places in such lists
    inside: set[int] = set()  # units
    for place, (module, parent) in enumerate(zip(tree.modules, tree.parents, strict=True)):
        if parent in found or parent in inside:
            inside.add(place)
        elif parent in items:
            item = place if isinstance(tree.modules[parent], _LISTS) else items[parent]
            (found if is_unit[place] else items)[place] = item
        elif isinstance(module, _LISTS) and units[place] > 1:
            items[place] = place
    return found


def largest_of_many(
    blocks: Sequence[Block], tree: Tree, parameters: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[Block, float] | None:
    """A block of several modules that holds more than half of all bytes, and its share."""
    totals = [sum(map(sizes.__getitem__, block.members)) for block in blocks]
    largest = max(range(len(blocks)), key=totals.__getitem__)
    share = totals[largest] / max(sum(totals), 1)
    owners = tree.owners({id(parameters[i]) for i in blocks[largest].members})
    return (blocks[largest], share) if share > 0.5 and len(owners) > 1 else None


def bytes_of(parameters: Sequence[Tensor], dtypes: Dtypes | None) -> list[int]:
    """The bytes of each parameter, in its dtype of computation."""
    given = [None] * len(parameters) if dtypes is None else dtypes
    pairs = zip(locals_of(parameters), given, strict=True)
    return [p.numel() * (dtype or p.dtype).itemsize for p, dtype in pairs]


def parts(blocks: Sequence[Block]) -> list[tuple[int, list[int]]]:
    """Members that make units of their own, with the number of their block, in the order in which a
    backward completes them.

    The root's parameters that are registered after all other blocks, such as a head's, come first.
    In one unit with an embedding's their gradients would occupy a bucket during the whole backward.
    """
    *others, root = range(len(blocks))
    last = max([-1, *chain.from_iterable([blocks[b].members for b in others])])
    late = [i for i in blocks[root].members if i > last]
    early = [i for i in blocks[root].members if i <= last]
    found = [(root, late), *((b, blocks[b].members) for b in others), (root, early)]
    return [(block, members) for block, members in found if members]
