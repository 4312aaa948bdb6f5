"""``iter_full_params``: the whole parameters of a sharded model, one after the other."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zero_ext import _C
from zero_ext.engine.checks import DTYPES, check_module, check_positive
from zero_ext.engine.handle import Handle
from zero_ext.state.model_state import entry_in_unit, groups_of, has_wider_master, plain_name, whole
from zero_ext.tensor.meshes import local_of

_ALIGNMENT_BYTES = 64


def iter_full_params(
    module: nn.Module,
    *,
    bucket_mb: float = 25.0,
    dtype: torch.dtype | None = None,
    rank0_only: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """The whole parameters of ``module`` one after the other: for export, averages, evaluation.

    Parameters that no rank holds whole are gathered into buckets; two buckets are the most that is
    held beside the sharded model, if you keep none of the tensors. Every rank must iterate.
    Exception: one rank may do so alone where ``stats()["neighbors"]`` counts all other ranks and
    ``dtype`` asks for no masters. A rank may leave the loop early, and the object stays usable. It
    takes part in the gathers of the others before the loop ends, so do not keep an iterator that is
    not finished: call its ``close()``. Values are those at the time of the bucket's gather::

        for name, tensor in zero_ext.iter_full_params(model, dtype=torch.bfloat16):
            server.update(name, tensor)

    Args:
        module: Sharded by ``shard()``, or its parameters by an optimizer of this package. A plain
            module yields its own parameters.
        bucket_mb: Size of a bucket in MiB, the same on every rank. A larger parameter makes a
            larger bucket.
        dtype: Default: each parameter's own dtype, the values that a forward computes with. Any
            other of fp32, bf16 and fp16: the fp32 master, rounded to it. Parameters that are in
            none of these (quantised weights) keep theirs.
        rank0_only: Only the first of the ranks that the module is sharded over yields parameters.
            The others send theirs, and yield nothing.
    Yields:
        The name as in ``module.named_parameters()``, without the wrappers of ``torch.compile``, and
        the tensor in the parameter's shape, on its device. A tied parameter comes once, under its
        first name. Only read the tensor: it may be the parameter itself. You may keep it, with the
        memory of its bucket.
    Raises:
        TypeError, ValueError: an argument is wrong.
        RuntimeError: while iterating, inside a backward, or where ``offload_states`` has moved
            parameters or masters; or ranks have different arguments.
    """
    check_module(module, "iter_full_params()")
    check_positive("bucket_mb", bucket_mb, finite=True)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"zero_ext: dtype must be None or one of {DTYPES}, not {dtype!r}.")
    wanted = not rank0_only or groups_of(module).rank == 0
    named = [(plain_name(name), p) for name, p in module.named_parameters()]
    return iterate_whole(named, dtype, int(bucket_mb * 2**20), wanted)


def iterate_whole(
    named: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    bucket_bytes: int,
    wanted: bool,
) -> Iterator[tuple[str, Tensor]]:
    """``iter_full_params`` of these parameters. ``wanted``: this rank yields them."""
    memory = _Memory()
    buckets = _cut(named, dtype, bucket_bytes)
    to_come = iter(buckets)
    try:
        for bucket in to_come if wanted else ():
            try:
                tensors = bucket.gather(memory)
            except BaseException:
                to_come = iter(())  # the other ranks meet no error of ours in a later gather
                raise
            while tensors:  # nothing here holds what was yielded
                yield bucket.names[-len(tensors)], _in_dtype(tensors.pop(0), dtype)
    finally:
        for bucket in to_come:
            if not bucket.serve(memory) and not any(each.lies_on_meshes for each in buckets):
                break


def _in_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return tensor.to(dtype) if dtype is not None and tensor.dtype in DTYPES else tensor


class _Bucket:
    """Parameters that are gathered together, or one that this rank holds whole.

    Args:
        handle: Of the engine that gathers them. None: nothing is gathered.
        dtype: See ``iter_full_params``.
    """

    def __init__(self, handle: Handle | None, masters: bool, dtype: torch.dtype | None):
        self.handle, self.masters = handle, masters
        self.names: list[str] = []
        self._parameters: list[Tensor] = []
        self._indices: list[int] = []
        self._spans: list[tuple[int, int]] = []  # of bytes
        self._dtype = dtype
        # Whether this rank reads what it needs, without the others.
        self._alone = handle is not None and (
            handle.replicated or (not masters and handle.engine.serves_one_alone)
        )
        self.nbytes = 0
        # Ranks of its other dimensions take part in every gather, whoever wants it.
        self.lies_on_meshes = False

    def add(self, name: str, parameter: Tensor, i: int = -1) -> None:
        begin = -(-self.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.nbytes = begin + local_of(parameter).numel() * self._dtype_of(parameter).itemsize
        self.lies_on_meshes |= isinstance(parameter, DTensor)
        self.names.append(name)
        self._parameters.append(parameter)
        self._indices.append(i)
        self._spans.append((begin, self.nbytes))

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        """Of what is gathered. Peers that are only read cannot round before they send."""
        reads = self._alone and not self.masters
        return parameter.dtype if reads or self._dtype is None else self._dtype

    def gather(self, memory: "_Memory") -> list[Tensor]:
        """The parameters, whole."""
        if self.handle is None:
            return [whole(parameter.detach()) for parameter in self._parameters]
        with torch.inference_mode(False), torch.no_grad():
            flat = self._flat(memory)
            arguments = {"indices": self._indices, "into": flat, "masters": self.masters}
            if self._alone:
                self.handle.engine.read_whole(**arguments)
            else:
                self.handle.engine.gather_whole(**arguments, wanted=True)
            gathered = zip(flat, self._parameters, self._indices, strict=True)
            return [whole(self.handle.as_whole(each, i, p)) for each, p, i in gathered]

    def serve(self, memory: "_Memory") -> bool:
        """Take part in the gather of the other ranks. False where no rank gathers any more."""
        if self.lies_on_meshes:
            self.gather(memory)
            return True
        if self.handle is None or self._alone:
            return True
        with torch.inference_mode(False), torch.no_grad():
            into = self._flat(memory)
            return self.handle.engine.gather_whole(
                indices=self._indices, into=into, masters=self.masters, wanted=False
            )

    def _flat(self, memory: "_Memory") -> list[Tensor]:
        """A 1-D tensor for each parameter."""
        buffer = memory.take(self.nbytes, self.handle.groups.device)
        return [
            buffer[begin:end].view(self._dtype_of(parameter))
            for parameter, (begin, end) in zip(self._parameters, self._spans, strict=True)
        ]


class _Memory:
    """Two buffers, which are used again where nobody holds their tensors any more.

    Fresh pages of the host take as long as the gather. A device's allocator reuses memory itself,
    and knows the streams that use it.
    """

    def __init__(self):
        self._buffers: list[Tensor] = []

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """[nbytes] uint8, not initialised."""
        free = [b for b in self._buffers if not _C.shares_memory(b)]
        for buffer in free:
            if buffer.numel() >= nbytes:
                return buffer
        self._buffers = [b for b in self._buffers if all(b is not other for other in free)]
        del free
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self._buffers = [*self._buffers[-1:], buffer]
        return buffer


def _cut(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, bucket_bytes: int
) -> list[_Bucket]:
    buckets: list[_Bucket] = []
    for name, parameter in named:
        other = dtype is not None and dtype != parameter.dtype
        masters = other and has_wider_master(parameter)
        entry = entry_in_unit(parameter)
        handle, i = entry or (None, -1)
        if not masters and (handle is None or not handle.engine.comes_and_goes(i)):
            handle, i = None, -1
        last = buckets[-1] if buckets else None
        fits = last is not None and (last.handle, last.masters) == (handle, masters)
        if not fits or handle is None or last.nbytes + parameter.nbytes > bucket_bytes:
            buckets.append(_Bucket(handle, masters, dtype))
        buckets[-1].add(name, parameter, i)
    return buckets
