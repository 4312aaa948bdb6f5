"""Values that differ between ranks by design, in a checkpoint: each rank's own are kept.

Note [Values of ranks]
Some values lie whole on every rank: buffers, ignored parameters and their optimizers' states, what
hooks put into ``state_dict()``, extra states, and the user's ``extra``. Ranks compare digests of
them in each save. The key of a value has rank 0's. Where the values differ, each other rank also
writes its own, under the key ``zero_ext.rank<rank>.<key>``. The same number of ranks reads them
back. Another number of ranks, and plain torch, read rank 0's.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_ext import _C
from zero_ext.checkpoint import pickles
from zero_ext.ranks.agreement import of_all_ranks
from zero_ext.ranks.groups import Groups
from zero_ext.state.model_state import ModelState, entry_in_unit, is_extra_state

EXTRA = "zero_ext.extra"  # the key of what the user has passed
_OWN = re.compile(r"zero_ext\.rank(\d+)\.(.+)", re.DOTALL)


def own_key(key: str, rank: int) -> str:
    return f"zero_ext.rank{rank}.{key}"


def own_keys(keys: Iterable[str], rank: int) -> dict[str, str]:
    """The keys of the values that ``rank`` has written for itself, by the keys of rank 0's."""
    found = {key: _OWN.fullmatch(key) for key in keys}
    return {each[2]: key for key, each in found.items() if each and int(each[1]) == rank}


def differing_keys(keys: Iterable[str]) -> list[str]:
    """The keys of rank 0's values of which some other rank has written its own."""
    return sorted({each[2] for key in keys if (each := _OWN.fullmatch(key))})


class RankValues:
    """The values of a save that may differ between ranks.

    Args:
        state: What is to be written, by key.
        extra: The user's, of which a checkpoint has one entry.
    """

    def __init__(self, state: Mapping[str, Any], extra: Any, of_model: ModelState, groups: Groups):
        sharded = {name for name, v in of_model.tensors.items() if entry_in_unit(v) is not None}
        self._groups = groups
        self._values: dict[str, Any] = {}
        self._digests: list[int] = []
        if groups.world == 1:
            return
        whole = {k: v for k, v in state.items() if _name(k) not in sharded}
        whole = {k: v for k, v in whole.items() if not isinstance(v, DTensor)}
        self._values = dict(sorted([*whole.items(), (EXTRA, extra)]))
        self._digests = [digest_of(value) for value in self._values.values()]

    def own(self) -> dict[str, Any]:
        """The values that this rank writes beside rank 0's, by its own keys. Collective."""
        if self._groups.world == 1:
            return {}
        what = "save() of a checkpoint"
        if len(set(of_all_ranks(digest_of(self._digests), self._groups, what))) == 1:
            return {}
        everyone = zip(*of_all_ranks(self._digests, self._groups, what), strict=True)
        rank, values = self._groups.rank, zip(self._values.items(), everyone, strict=True)
        return {
            own_key(key, rank): value if _is_tensor(key, value) else pickles.pickled(value)
            for (key, value), digests in values
            if rank > 0 and len(set(digests)) > 1
        }


def _name(key: str) -> str:
    """The name of the model's entry that a value belongs to."""
    if key.startswith("model."):
        return key.removeprefix("model.")
    return key.removeprefix("optimizer.state.").rpartition(".")[0]


def _is_tensor(key: str, value: Any) -> bool:
    return isinstance(value, Tensor) and not is_extra_state(key)


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
