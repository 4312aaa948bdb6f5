"""Values that differ between ranks by design, in a checkpoint: each rank's own are kept.

Note [Values of ranks]
Some values lie whole on every rank: buffers, ignored parameters and their optimizers' states, what
hooks put into ``state_dict()``, extra states, and the user's ``extra``. Ranks compare digests of
them in each save. The key of a value has rank 0's. Where the values differ, each other rank also
writes its own, under the key ``zero_ext.rank<rank>.<key>``. The same number of ranks reads them
back. Another number of ranks, and plain torch, read rank 0's.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from zero_ext import _C
from zero_ext.checkpoint import pickles
from zero_ext.ranks.agreement import of_all_ranks
from zero_ext.ranks.groups import Groups
from zero_ext.state.model_state import ModelState, entry_in_unit, is_extra_state

EXTRA = "zero_ext.extra"  # the key of what the user has passed
_OWN = re.compile(r"zero_ext\.rank(\d+)\.(.+)", re.DOTALL)


def read_own(metadata: Metadata, rank: int) -> list[str]:
    """Let ``metadata`` name the values that ``rank`` has written for itself in the places of rank
    0's. Returns their keys."""
    entries, places = metadata.state_dict_metadata, metadata.storage_data
    found = {key: _OWN.fullmatch(key) for key in entries}
    keys = {key: each[2] for key, each in found.items() if each and int(each[1]) == rank}
    for own, key in keys.items():
        entries[key] = entries[own]
    for index in [index for index in places if index.fqn in keys]:
        places[dataclasses.replace(index, fqn=keys[index.fqn])] = places[index]
    return [*keys.values()]


def differing_keys(keys: Iterable[str]) -> list[str]:
    """The keys of rank 0's values of which some other rank has written its own."""
    return sorted({each[2] for key in keys if (each := _OWN.fullmatch(key))})


def digests_of(state: Mapping[str, Any], extra: Any, of_model: ModelState) -> dict[str, int]:
    """Of the values in a save that may differ between ranks, by key.

    Args:
        state: What is to be written, by key.
        extra: The user's, of which a checkpoint has one entry.
    """
    sharded = {name for name, v in of_model.tensors.items() if entry_in_unit(v) is not None}
    whole = {k: v for k, v in state.items() if _name(k) not in sharded}
    whole = {k: v for k, v in whole.items() if not isinstance(v, DTensor)}
    return {key: digest_of(value) for key, value in sorted([*whole.items(), (EXTRA, extra)])}


def own_values(state: Mapping[str, Any], digests: dict[str, int], groups: Groups) -> dict[str, Any]:
    """The values of ``state`` that this rank writes beside rank 0's, by its own keys. Collective,
    of several ranks."""
    what = "save() of a checkpoint"
    if len(set(of_all_ranks(digest_of(digests), groups, what))) == 1:
        return {}
    everyone = of_all_ranks(digests, groups, what)
    differing = [k for k in digests if any(other[k] != digests[k] for other in everyone)]
    own = f"zero_ext.rank{groups.rank}."
    return {
        own + key: value if _is_stored(key, value) else pickles.pickled(value)
        for key, value in ((key, state[key]) for key in differing if groups.rank > 0)
    }


def _name(key: str) -> str:
    """The name of the model's entry that a value belongs to."""
    if key.startswith("model."):
        return key.removeprefix("model.")
    return key.removeprefix("optimizer.state.").rpartition(".")[0]


def _is_stored(key: str, value: Any) -> bool:
    """Whether the value is in a form that torch.distributed.checkpoint writes as it is."""
    return key == EXTRA or (isinstance(value, Tensor) and not is_extra_state(key))


def digest_of(value: Any) -> int:
    """A number that is equal for equal values, on every rank and device."""
    return _C.digest(repr(_described(value)).encode())


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor", value.dtype, tuple(value.shape), _C.digest(_bytes_of(value))
    if isinstance(value, Mapping):
        return type(value).__name__, [(_described(k), _described(value[k])) for k in value]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_described(each) for each in value]
    if isinstance(value, (set, frozenset)):  # of strings, each process has another order
        return type(value).__name__, sorted(repr(_described(each)) for each in value)
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return type(value).__name__, value
    return type(value).__name__, _C.digest(pickles.pickled(value))


def _bytes_of(value: Tensor) -> Any:
    if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
        return pickles.pickled(value.detach().cpu())
    here = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return here.reshape(-1).view(torch.uint8).numpy()
