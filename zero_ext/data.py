"""Global batches: what a step trains on, cut into micro-batches, does not depend on the ranks.

Micro-batch k of a step goes to rank ``k % N`` as its ``k // N``-th backward. Gradients are added in
the order (backward, rank), so in the order of k whatever N is.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from zero_ext.engine.checks import check_count, check_module
from zero_ext.engine.handle import Handle
from zero_ext.ranks.groups import rank_and_world
from zero_ext.replay import Replay
from zero_ext.state.model_state import handles_of, refuse_meshes


def _seed_of(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@contextlib.contextmanager
def seeded(seed: int, step: int, k: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's generators for micro-batch ``k`` of a step, and restore them afterwards.

    Dropout inside the context then depends on these three numbers alone, and on no rank.

    Args:
        step: Counted from the beginning of the training, not of an epoch.
        device: Its generator is seeded beside the CPU's.
    """
    device = torch.device(device)
    with torch.random.fork_rng(
        devices=[] if device.type == "cpu" else [device],
        device_type="cuda" if device.type == "cpu" else device.type,
    ):
        number = _seed_of(seed, step, k)
        torch.default_generator.manual_seed(number)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(number)
        yield


class GlobalBatches(Sampler[list[int]]):
    """A batch sampler: ``DataLoader(dataset, batch_sampler=batches)`` yields this rank's part.

    Each sample comes once in an epoch, for any number of ranks, also where that number changes
    between two steps. The position is (epoch, step): it counts what ``steps()`` has handed out, and
    not what workers of the DataLoader have read ahead::

        for epoch in range(batches.epoch, epochs):
            batches.set_epoch(epoch)
            for step in batches.steps(loader, model):
                for x, y in step:
                    loss_of(model(x), y).backward()
                optimizer.step(divide_by=len(step))
                optimizer.zero_grad()

    Args:
        dataset: Only its length is used.
        batch_size: Samples of a micro-batch. The last one of an epoch may have fewer.
        micro_batches: Micro-batches of a step on all ranks together. The last step of an epoch may
            have fewer. With fewer micro-batches than ranks some ranks get none.
        num_replicas, rank: Default: those of ``torch.distributed``, or one process.
        shuffle: By ``seed`` and epoch.
        seed: The same on every rank.
    Raises:
        ValueError, TypeError: an argument makes no sense.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        micro_batches: int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ):
        own, world = rank_and_world()
        num_replicas = world if num_replicas is None else num_replicas
        rank = own if rank is None else rank
        counts = {"batch_size": batch_size, "micro_batches": micro_batches}
        for name, count in {**counts, "num_replicas": num_replicas}.items():
            check_count(name, count)
        if not 0 <= rank < num_replicas:
            raise ValueError(f"zero_ext: there is no rank {rank} among {num_replicas} replicas.")
        self.num_replicas, self.rank, self.seed = num_replicas, rank, seed
        # A saved position is valid for these values alone.
        self._of = {"samples": len(dataset), **counts, "shuffle": bool(shuffle), "seed": seed}
        check_count("the length of the dataset", self._of["samples"])
        self.epoch, self.step = 0, 0
        self.steps_per_epoch = -(-len(dataset) // (batch_size * micro_batches))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``, or stay where the position already is in it."""
        if epoch != self.epoch:
            self.go_to(epoch, 0)

    def go_to(self, epoch: int, step: int) -> None:
        """Step ``steps_per_epoch`` of an epoch is the beginning of the next one."""
        self.epoch, self.step = (epoch + 1, 0) if step == self.steps_per_epoch else (epoch, step)

    def state_dict(self) -> dict[str, Any]:
        """The position, equal on all ranks: save it after ``optimizer.step()``."""
        return {"epoch": self.epoch, "step": self.step, **self._of}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a saved position, on any number of ranks.

        Raises:
            ValueError: it was saved with another dataset length, size or number of micro-batches,
                seed or order. Nothing has changed.
        """
        for name, value in self._of.items():
            if state_dict[name] != value:
                raise ValueError(
                    f"zero_ext: the saved position is one of global batches with {name}="
                    f"{state_dict[name]!r}, and this GlobalBatches has {name}={value!r}. Pass the "
                    "saved value, or call set_epoch() to begin an epoch with the new one."
                )
        self.go_to(state_dict["epoch"], state_dict["step"])

    def numbers(self, step: int, rank: int | None = None) -> range:
        """The numbers of a rank's micro-batches in ``step`` of an epoch. Default: this rank."""
        left = -(-self._of["samples"] // self._of["batch_size"]) - step * self._of["micro_batches"]
        rank = self.rank if rank is None else rank
        return range(rank, min(left, self._of["micro_batches"]), self.num_replicas)

    def samples(self, step: int, k: int) -> slice:
        """The samples of micro-batch ``k`` of a step, in the order of the epoch."""
        begin = (step * self._of["micro_batches"] + k) * self._of["batch_size"]
        return slice(begin, begin + self._of["batch_size"])

    def order(self, epoch: int) -> Sequence[int]:
        """The samples of an epoch, by their indices in the dataset."""
        if not self._of["shuffle"]:
            return range(self._of["samples"])
        generator = torch.Generator("cpu").manual_seed(_seed_of(self.seed, epoch))
        return torch.randperm(self._of["samples"], generator=generator, device="cpu").tolist()

    def __len__(self) -> int:
        """Micro-batches that this rank still has in the epoch."""
        return sum(len(self.numbers(step)) for step in range(self.step, self.steps_per_epoch))

    def __iter__(self) -> "_Indices":
        return _Indices(self)

    def steps(
        self,
        loader: Iterable,
        model: nn.Module,
        *,
        replay_every: int | None = None,
        loss_of: Callable[[Any], Tensor] | None = None,
    ) -> Iterator["Step"]:
        """The steps that are left in the epoch. Inside a step gradients are summed, not averaged.

        So ``optimizer.step()`` must have ``divide_by``, by which the update divides the sum once.

        Args:
            loader: A ``DataLoader`` with these batches as ``batch_sampler``, or a
                ``StatefulDataLoader`` of torchdata.
            model: Sharded over the same number of ranks, with ``reduction="exchange"``.
            replay_every: In one of so many steps each rank also runs a micro-batch of another rank.
                Gradients with other bits are an error before the update: a processor is faulty.
            loss_of: The loss of a micro-batch, as the loop computes it. Replays call it.
        Raises:
            ValueError: another loader or another number of ranks; ``optimizer.step()`` without
                ``divide_by``.
            RuntimeError: gradients were summed by ranks before they are summed in order, as in
                ``no_sync()``; a step was left before its last micro-batch.
        """
        check_module(model, "GlobalBatches.steps()")
        if getattr(loader, "batch_sampler", None) is not self:
            raise ValueError(
                "zero_ext: GlobalBatches.steps() takes a loader over these batches: "
                "DataLoader(dataset, batch_sampler=batches)."
            )
        handles = handles_of(model)
        self._check(handles, model)
        replays = None
        if replay_every is not None:
            check_count("replay_every", replay_every)
            if loss_of is None:
                raise ValueError(
                    "zero_ext: replay_every needs loss_of. Pass the function of a micro-batch that "
                    "the loop calls for its loss."
                )
            refuse_meshes(model, "replay_every")
            replays = _Replays(self, replay_every, loss_of, loader, model, handles)
        return self._steps(loader, handles, replays)

    def _check(self, handles: Sequence[Handle], model: nn.Module) -> None:
        if not handles:
            raise ValueError(
                f"zero_ext: this {type(model).__name__} is not sharded, and nothing sums its "
                "gradients in order. Call zero_ext.shard(model) first."
            )
        for handle in handles:
            groups, reduction = handle.groups, handle.options.reduction
            if groups.world != self.num_replicas:
                raise ValueError(
                    f"{groups.where}the model is sharded over {groups.world} ranks, and "
                    f"GlobalBatches has num_replicas={self.num_replicas}. Pass "
                    f"num_replicas={groups.world} and this rank's number among them."
                )
            by_default = reduction is None and groups.device.type == "cpu"
            if groups.world > 1 and reduction != "exchange" and not by_default:
                raise ValueError(
                    f"{groups.where}the backend sums gradients in an order that depends on the "
                    "number of ranks. Call zero_ext.shard(model, reduction='exchange')."
                )

    def _steps(
        self, loader: Iterable, handles: Sequence[Handle], replays: "_Replays | None"
    ) -> Iterator["Step"]:
        batches = iter(loader)  # a StatefulDataLoader goes to its position here
        epoch = self.epoch
        for number in range(self.step, self.steps_per_epoch):
            step = Step(self, epoch, number, batches, handles, replays)
            with _summing(handles):
                yield step
            step.check_finished()
            self.go_to(epoch, number + 1)


class _Indices:
    """The samples of each micro-batch that this rank still has in the epoch.

    A StatefulDataLoader saves and loads the position of this iterator, which is ahead of the
    batches' own where workers read ahead.
    """

    def __init__(self, owner: GlobalBatches):
        self._owner, self._order = owner, owner.order(owner.epoch)
        self._place = owner.epoch, owner.step, 0  # epoch, step, micro-batches taken in it

    def __iter__(self) -> "_Indices":
        return self

    def __next__(self) -> list[int]:
        epoch, step, taken = self._place
        while step < self._owner.steps_per_epoch:
            numbers = self._owner.numbers(step)
            if taken < len(numbers):
                ends = taken + 1 == len(numbers)
                self._place = (epoch, step + 1, 0) if ends else (epoch, step, taken + 1)
                return list(self._order[self._owner.samples(step, numbers[taken])])
            step, taken = step + 1, 0
        raise StopIteration

    def state_dict(self) -> dict[str, tuple[int, int, int]]:
        return {"place": max(self._place, (self._owner.epoch, self._owner.step, 0))}

    def load_state_dict(self, state_dict: dict[str, tuple[int, int, int]]) -> None:
        epoch, step, taken = state_dict["place"]
        if taken > 0:
            raise ValueError(
                f"zero_ext: the loader's state was saved inside step {step} of epoch {epoch}, after"
                f" {taken} micro-batches. Save it after a step."
            )
        self._owner.go_to(epoch, step)
        self.__init__(self._owner)


class Step:
    """The micro-batches of a step that this rank has. ``len()`` is their number, also 0.

    Each micro-batch is run with ``seeded(seed, number, k)``.

    Attributes:
        number: Of the step, counted from the beginning of epoch 0.
    """

    def __init__(
        self,
        owner: GlobalBatches,
        epoch: int,
        step: int,
        batches: Iterator,
        handles: Sequence[Handle],
        replays: "_Replays | None",
    ):
        self.number = epoch * owner.steps_per_epoch + step
        self._owner, self._place, self._batches = owner, (epoch, step), batches
        self._left = list(owner.numbers(step))
        self._length, self._handles = len(self._left), handles
        self._replays = replays

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator:
        seed, device = self._owner.seed, self._handles[0].groups.device
        epoch, step = self._place
        replay = self._replays and self._replays.of_step(epoch, step, self.number)
        while self._left:
            with seeded(seed, self.number, self._left[0], device):
                batch = next(self._batches)
                k = self._left.pop(0)
                with replay.watching(k) if replay else contextlib.nullcontext():
                    yield batch
            self._check_summed(k)
        if replay:
            replay.compare(self.number)
        self._owner.go_to(epoch, step + 1)

    def _check_summed(self, k: int) -> None:
        for handle in self._handles:
            if handle.engine.unreduced > 0:
                raise RuntimeError(
                    f"{handle.groups.where}micro-batch {k} of step {self.number} is summed on this "
                    "rank alone, so the bits depend on the number of ranks. Run the backward "
                    "outside no_sync(), and shard without accumulation_steps."
                )

    def check_finished(self) -> None:
        if self._left:
            raise RuntimeError(
                f"zero_ext [rank {self._owner.rank}]: step {self.number} was left before "
                f"micro-batch {self._left[0]}. Run all micro-batches of a step."
            )


class _Replays(NamedTuple):
    owner: GlobalBatches
    every: int
    loss_of: Callable[[Any], Tensor]
    loader: Any
    model: nn.Module
    handles: Sequence[Handle]

    def of_step(self, epoch: int, step: int, number: int) -> Replay | None:
        """The replay of a step, if it is due and several ranks have equally many micro-batches.

        Else a rank would wait here for ranks that still need it in their backwards.
        """
        groups = self.handles[0].groups
        rank, world = self.owner.rank, groups.world
        most, least = (len(self.owner.numbers(step, r)) for r in (0, world - 1))
        if number % self.every or world == 1 or most != least or not most:
            return None
        turn = number // self.every  # another micro-batch each time

        @contextlib.contextmanager
        def batch_of(k: int) -> Iterator[Any]:
            indices = [*self.owner.order(epoch)[self.owner.samples(step, k)]]
            loader = DataLoader(
                self.loader.dataset, batch_sampler=[indices], collate_fn=self.loader.collate_fn
            )
            seeds = (self.owner.seed, number, k, groups.device)
            with seeded(*seeds):
                batches = iter(loader)  # draws a seed for workers
            with seeded(*seeds):
                yield next(batches)

        each = (self.owner.numbers(step, r) for r in (rank, (rank - 1) % world))
        own, other = (numbers[turn % len(numbers)] for numbers in each)
        from_rank_0 = any(handle.options.broadcast_buffers for handle in self.handles)
        return Replay(self.loss_of, batch_of, self.model, groups, own, other, from_rank_0)


@contextlib.contextmanager
def _summing(handles: Sequence[Handle]) -> Iterator[None]:
    """Gradients are not divided before the update, which must divide them."""
    optimizers = {id(o): o for handle in handles for o in handle.optimizers}.values()
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.register_step_pre_hook(_check_divided))
        for handle in handles:
            before = handle.engine.divide_factor or handle.groups.world
            stack.callback(handle.engine.set_divide_factor, before)
            handle.engine.set_divide_factor(1.0)
        yield


def _check_divided(optimizer: torch.optim.Optimizer, args: tuple, keywords: dict) -> None:
    if keywords.get("divide_by") is None:
        raise ValueError(
            "zero_ext: gradients are summed in a step of GlobalBatches, and step() has no "
            "divide_by. Call optimizer.step(divide_by=len(step)), or pass this rank's number of "
            "tokens."
        )
