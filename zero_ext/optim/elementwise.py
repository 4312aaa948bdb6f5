"""Whether an optimizer can be run on pieces of its parameters, found by the operations it calls.

Note [Judge]
Twelve steps run on a matrix under a dispatch mode, which sees each operation of torch. One that
takes or makes a tensor of the matrix's size must compute each element from that element alone. The
first other one ends the trial, and the message names it. Kernels that torch does not dispatch, in
foreign C++, Triton or NumPy, leave values that no operation has made. They are unknown, as custom
operators are, and get whole parameters. The same steps on a vector with other values must call the
same operations with the same numbers, so no number may depend on a shape, a size or on values.

Values are compared for one question alone: whether parameters with an optimizer each become what
they do with one optimizer.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from zero_ext._torch import TorchDispatchMode, schema_of, tree_flatten, tree_leaves, tree_map_only
from zero_ext.optim.groups import named_in, settings_of

# The first is large enough for what is done to large parameters only, such as rounding states. The
# last is the piece of a rank without elements: its step must not raise.
_MATRIX, _VECTOR, _NOTHING = (128, 192), (1083,), (0,)
_STEPS = 12  # an optimizer may update its parameters in every fourth step only
_TOGETHER = ((3, 4), (64, 128))
# Of gradients: an optimizer may clip beyond a bound. Rising: early ones do not hide late ones.
_SCALES = (1e-4, 1.0, 1e4)
_OF_A_LAYER = ("lr", "initial_lr", "name")  # settings that change no operation
_LR = 0.1  # in place of every given rate: with 0, where warm-ups begin, nothing moves
_UPDATE, _FIRST_STATES = "update of one element", "first state"
_KNOWN = (Number, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

# Elementwise, or keep all elements in their order, without the tag.
_KEEP = {
    *("_to_copy", "_unsafe_view", "alias", "complex", "copy", "detach", "expand", "fill", "polar"),
    *("lift_fresh", "squeeze", "unsqueeze", "view", "view_as_complex", "view_as_real", "zero"),
    *(f"{name}{kind}" for name in ("empty", "full", "ones", "zeros") for kind in ("", "_like")),
    *("empty_strided", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    *("_fused_adagrad", "_fused_adam", "_fused_adamw", "_fused_sgd"),
}


class WholeParametersError(TypeError):
    """Not elementwise, but each parameter is updated by itself."""


class _NotElementwiseError(Exception):
    """Says what an optimizer does that is not elementwise."""


_Make = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


def kind_of(group: dict[str, Any], keywords: dict[str, Any]) -> str:
    """Equal for groups and keywords of which only one has to be tried. Each layer may have a rate
    and a name. Numbers among the keywords may change from step to step, as rates do."""
    settings = {k: v for k, v in settings_of(group).items() if k not in _OF_A_LAYER}
    kinds = {k: v if isinstance(v, str | bool | None) else type(v) for k, v in keywords.items()}
    return repr((settings, isinstance(group.get("lr"), Tensor), kinds))


def check(
    optimizer_class: type, kwargs: dict, group: dict[str, Any], keywords: dict | None = None
) -> dict[str, bool]:
    """Run twelve steps on a matrix and on a vector, and on two matrices, on the CPU.

    Args:
        group: With settings of its own, or empty: LARS is elementwise where weights do not decay.
        keywords: Of its ``step``.
    Returns:
        Of each state that the first step makes, whether it has a value for each element.
    Raises:
        WholeParametersError: it is not elementwise, and updates each parameter by itself.
        TypeError: it does not.
        Exception: whatever the optimizer's constructor raises.
    """
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    if keywords:
        name += f" with step({', '.join(f'{k}={v!r}' for k, v in keywords.items())})"

    def make(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        group_of_all = {**_for_trial(settings_of(group)), "params": list(parameters)}
        optimizer = optimizer_class([group_of_all], **_for_trial(kwargs))
        if keywords:
            optimizer.step = functools.partial(optimizer.step, **_for_trial(keywords))
        return optimizer

    # A mode, which every call passes: entered only where it changes something.
    default = torch.get_default_device().type
    with contextlib.nullcontext() if default == "cpu" else torch.device("cpu"):
        make([torch.nn.Parameter(torch.zeros(3, 4))])
        _check_by_itself(make, name)
        try:
            return _states_of_elements(make)
        except _NotElementwiseError as error:
            raise WholeParametersError(
                f"zero_ext: {name} is not elementwise with these settings: {error}. So it needs "
                "whole parameters. Pass all groups to wrap() at once."
            ) from None


def _for_trial(given: dict[str, Any]) -> dict[str, Any]:
    """Copies, because optimizers write to tensors among their settings."""
    settings = {name: value for name, value in given.items() if name != "capturable"}  # of devices
    settings = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), settings)
    if isinstance(lr := settings.get("lr"), Tensor | float | int):
        settings["lr"] = lr.fill_(_LR) if isinstance(lr, Tensor) else _LR
    return settings


def begin_training(optimizer: torch.optim.Optimizer) -> None:
    """Schedule-free optimizers step in no other mode."""
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()


class _Judge(TorchDispatchMode):
    """Sees the operations on tensors of ``numel`` elements, or twice as many: of complex ones the
    real and imaginary parts. Of 0 elements: sees none."""

    def __init__(self, numel: int):
        super().__init__()
        self._sizes = {numel, 2 * numel} if numel else set()
        self._left: dict[int, Tensor] = {}  # by address: the bytes that the last operation left
        self._found: _NotElementwiseError | None = None
        self.facts: list[Any] = []  # each operation with its numbers

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self.check(taken)
        result = func(*args, **kwargs)
        made = tree_leaves(result)
        if schema_of(func).name.startswith("aten::new_"):  # takes a dtype and a device alone
            taken = []
        if not any(map(self._is_sized, (*taken, *made))):
            return result
        takes = all(self._is_sized(each) or each.numel() == 1 for each in taken)
        makes = all(self._is_sized(each) or each is None for each in made)
        if not (takes and makes and _is_elementwise(func, args)):
            self._end(f"calls {func.overloadpacket}")
        self.note([*made, *(taken if schema_of(func).is_mutable else ())])
        types = {each.name: str(each.type) for each in schema_of(func).arguments}
        given = (dict(zip(types, args, strict=False)) | kwargs).items()
        # But for shapes and dimensions.
        numbers = () if func.is_view else [v for k, v in given if types[k] != "List[int]"]
        self.facts.append((str(func), *map(self.fact_of, tree_leaves(numbers))))
        return result

    def _is_sized(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.numel() in self._sizes

    def _end(self, what: str) -> None:
        self._found = self._found or _NotElementwiseError(f"it {what}")
        raise self._found

    def note(self, values: Iterable[Any]) -> None:
        for tensor in filter(self._is_sized, values):
            self._left[tensor.untyped_storage().data_ptr()] = _bytes_of(tensor).clone()

    def check(self, values: Iterable[Any]) -> None:
        """Raise where tensors have values that no operation has left there."""
        if self._found is not None:  # the optimizer has caught it
            raise self._found
        for tensor in filter(self._is_sized, values):
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                self._end(f"computes with a {type(tensor).__name__}")
            left = self._left.get(tensor.untyped_storage().data_ptr())
            if left is None or not torch.equal(left, _bytes_of(tensor)):
                self._end("calls a kernel that torch does not dispatch")

    def fact_of(self, value: Any) -> Any:
        """The part of a value that must not depend on a parameter's shape, size or value."""
        if isinstance(value, Tensor):
            return str(value.dtype) if self._is_sized(value) else repr(value.tolist())
        if isinstance(value, list | tuple | dict):  # in which a state is kept as one for all
            leaves, kind = tree_flatten(value)
            return [kind, *(object() if self._is_sized(v) else self.fact_of(v) for v in leaves)]
        # An object of the optimizer's own may hold matrices that are used after the trial.
        return repr(value) if value is None or isinstance(value, _KNOWN) else object()


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _is_elementwise(func, args) -> bool:
    namespace, name = schema_of(func).name.split("::")
    if namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    name = name.removeprefix("_foreach_").removesuffix("_")
    if name == "index_put":  # with masks
        return all(each is None or each.dtype == torch.bool for each in args[1])
    if name == "select":  # the real or the imaginary part
        return args[0].shape[args[1]] == 2 and args[1] in (-1, args[0].dim() - 1)
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else ()
    return name in _KEEP or any(torch.Tag.pointwise in each.tags for each in overloads)


def _states_of_elements(make: _Make) -> dict[str, bool]:
    """See Note [Judge] and ``check``. Raises where pieces of parameters do not do."""
    facts, kept = [], []
    for shape in (_MATRIX, _VECTOR, _NOTHING):
        judge = _Judge(math.prod(shape))
        try:
            kept.append(_run(make, [shape], [0], judge))
        except _NotElementwiseError:
            raise
        except Exception as error:
            raise _NotElementwiseError(
                f"with a parameter of shape {shape} it raises {type(error).__name__}: {error}"
            ) from None
        facts.append([*judge.facts, *((k, judge.fact_of(v)) for k, v in kept[-1].items())])
    if facts[0] != facts[1]:
        raise _NotElementwiseError(
            "what it does depends on a parameter's size or on several values"
        )
    return kept[0][_FIRST_STATES, 0]


def _check_by_itself(make: _Make, name: str) -> None:
    """Raise where what a parameter becomes depends on more than the parameter."""
    both = range(len(_TOGETHER))
    try:
        together = _run(make, _TOGETHER, both, _Judge(0))
    except Exception as error:
        raise TypeError(
            f"zero_ext: {name} cannot be sharded: the trial of its step() without a closure, with "
            f"dense gradients, raises {type(error).__name__}: {error}."
        ) from error
    alone = _difference(make, together, [0]) or _difference(make, together, [1])
    if alone is None:
        return
    again = _difference(make, together, both)
    raise TypeError(
        f"zero_ext: {name} cannot be sharded: it is not elementwise, and its {again or alone} "
        f"depends on {'random numbers' if again else 'other parameters'}. Use AdamW, Adam or SGD "
        "of zero_ext.optim, or wrap an optimizer that updates each parameter by itself."
    )


def _difference(make: _Make, together: dict[tuple, Any], members: Sequence[int]) -> str | None:
    """The value that differs by more than rounding if these parameters have their own optimizer."""
    try:
        found = _run(make, _TOGETHER, members, _Judge(0))
    except Exception:
        return _UPDATE
    for key in {**together, **found}:
        in_both = key in together and key in found
        if key[1] in (None, *members) and not (in_both and _same(together[key], found[key])):
            return key[0]
    return None


def _run(
    make: _Make, shapes: Sequence[tuple[int, ...]], members: Sequence[int], judge: _Judge
) -> dict[tuple, Any]:
    """Run steps of one optimizer of parameters of ``shapes[i]`` for all i in ``members``. Returns
    the values that it leaves: what it keeps for all of them, then for each."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1 + _STEPS, *shape, generator=generator) for shape in shapes]
    parameters = {i: torch.nn.Parameter(values[i][0].clone()) for i in members}
    judge.note(parameters.values())
    with judge:
        optimizer = make([*parameters.values()])
        begin_training(optimizer)
    updates: dict[tuple, Any] = {}
    for step in range(1, _STEPS + 1):
        for i, p in parameters.items():
            p.grad = values[i][step] * _SCALES[(step - 1) * len(_SCALES) // _STEPS]
        judge.note(p.grad for p in parameters.values())
        with judge:
            optimizer.step()
        judge.check(parameters.values())
        updates |= {(_UPDATE, i, step): p.detach().clone() for i, p in parameters.items()}
        for i, p in parameters.items() if step == 1 else ():
            state = optimizer.state.get(p, {}).items()
            updates[_FIRST_STATES, i] = {
                k: isinstance(v, Tensor) and v.shape == p.shape for k, v in state
            }
    settings = settings_of(optimizer.param_groups[0]).items()
    found: dict[tuple, Any] = {(f"group setting '{key}'", None): value for key, value in settings}
    states = {None: named_in(optimizer.state)}
    states |= {i: optimizer.state.get(p, {}) for i, p in parameters.items()}
    for i, state in states.items():
        found |= {(f"state '{key}'", i): value for key, value in state.items()}
    return found | updates


def _same(one: Any, other: Any) -> bool:
    (mine, kind), (theirs, its_kind) = tree_flatten(one), tree_flatten(other)
    return kind == its_kind and all(map(_same_leaf, mine, theirs))


def _same_leaf(a: Any, b: Any) -> bool:
    if not all(isinstance(each, Tensor | Number) for each in (a, b)):
        return a == b if isinstance(a, str) else type(a) is type(b)  # others are not comparable
    a, b = (torch.view_as_real(_plain(torch.as_tensor(v)).to(torch.complex128)) for v in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def _plain(value: Tensor) -> Tensor:
    """The values of a quantised state that is a class of tensors."""
    return value.detach() if type(value) in (Tensor, torch.nn.Parameter) else value.dequantize()
