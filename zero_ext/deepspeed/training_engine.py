"""TrainingEngine: the ``engine`` of a DeepSpeed script, over ``shard`` and the optimizers here.

Each method is a few lines of the library's own interface, which a new script uses directly.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zero_ext.deepspeed import status
from zero_ext.deepspeed.casting import autocasting
from zero_ext.deepspeed.config import Config
from zero_ext.deepspeed.engine_checkpoints import EngineCheckpoints
from zero_ext.deepspeed.reports import Reports
from zero_ext.module.forward_hooks import cast_floating
from zero_ext.ranks.groups import Groups
from zero_ext.state.unwrapping import unwrap

_log = logging.getLogger("zero_ext")


def data_loader(
    settings: Config,
    groups: Groups,
    dataset: Dataset,
    *,
    shuffle: bool = True,
    pin_memory: bool = True,
    sampler: Any = None,
    **arguments: Any,
) -> DataLoader:
    """``arguments``: more of ``DataLoader``."""
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(
            dataset, num_replicas=groups.world, rank=groups.rank, shuffle=shuffle
        )
    return DataLoader(
        dataset,
        sampler=sampler,
        pin_memory=pin_memory and groups.device.type != "cpu",
        drop_last=settings.drop_last,
        **{"batch_size": settings.micro_batch_size, **arguments},
    )


_engines: weakref.WeakSet["TrainingEngine"] = weakref.WeakSet()


@contextlib.contextmanager
def _dividing(engines: Iterable["TrainingEngine"], by: float) -> Iterator[None]:
    """Divide the gradients of backwards inside the context by ``by``, in all of ``engines``.

    With the loss scale, losses are divided by the accumulation steps themselves.
    """
    others = [each for each in engines if each._divisor() not in (None, by)]
    for each in others:
        each._divides(by)
    try:
        yield
    finally:
        for each in others:
            each._divides()


class TrainingEngine(EngineCheckpoints):
    """A sharded model with its optimizer, micro-batches and schedule. Made by ``initialize``.

    Call ``loss = engine(batch); engine.backward(loss); engine.step()`` for each micro-batch. An
    attribute that the engine does not have is looked up in the module.

    Attributes:
        module: The model itself.
        optimizer, lr_scheduler, training_dataloader: Each may be None.
        micro_steps: Calls of ``step()``.
        global_steps: Calls of ``step()`` that ended an accumulation.
        global_samples: Samples of all ranks in the global steps.
    """

    def __init__(self, module: nn.Module, settings: Config, collate_fn: Callable | None = None):
        super().__init__(module, settings)
        self.training_dataloader: DataLoader | None = None
        self._boundary: bool | None = None  # what the user has set; None: counted
        self._in_no_sync = False
        self._called_backward = False
        self._backwards = 0  # since the last step, by ``backward()``
        self._collate_fn = collate_fn
        self._reports = Reports(settings, self._groups, module)
        _engines.add(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
        try:
            return getattr(module, name)
        except AttributeError as error:
            raise AttributeError(
                f"zero_ext: the engine has no '{name}', and the module ({type(module).__name__}) "
                "neither."
            ) from error

    # A micro-batch

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. With fp16's ``auto_cast`` floating point inputs are cast first."""
        if self.settings.casts_inputs:
            inputs, kwargs = cast_floating((inputs, kwargs), self.settings.dtype)
        with self._reports.timed("forward"), autocasting(self.settings, self.device):
            return self.module(*inputs, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Add the gradients of ``loss``, divided by the accumulation steps if ``scale_wrt_gas``.

        Returns:
            The divided loss.
        """
        self._needs_optimizer("backward()")
        self._called_backward = True
        self._reports.add_loss(loss)
        self._backwards += 1
        if scale_wrt_gas and self.settings.accumulation_steps > 1:
            loss = loss / self.settings.accumulation_steps
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._reports.timed("backward"))
            # A loss may reach the parameters of other engines as well.
            stack.enter_context(_dividing(_engines, self.loss_scale()))
            if self.settings.managed_accumulation and not self.is_gradient_accumulation_boundary():
                stack.enter_context(self.module.no_sync())
            self.optimizer.scale(loss).backward(retain_graph=retain_graph)
        return loss

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` multiplied by the loss scale: ``engine.scale(loss).backward()``.

        Without a loss scale, ``loss.backward()`` does the same. The gradients of both are divided
        by the accumulation steps, as those of ``engine.backward(loss)`` are.
        """
        self._needs_optimizer("scale()")
        return self.optimizer.scale(loss)

    def _uses_backward(self) -> bool:
        """Whether ranks call ``backward()``, not ``loss.backward()``. A rank without data expects
        it of the others."""
        if self._called_backward:
            return True
        stats = self.optimizer.zero_core.handle.engine.stats()
        return stats["backwards"] == stats["served_backwards"]

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch. The last one of an accumulation updates the parameters. Collective.

        The schedule is not stepped if the update was skipped for NaN or Inf. Exception: on a GPU
        without a dynamic loss scale it is, because the host does not wait for the verdict.
        """
        self._needs_optimizer("step()")
        if self._in_no_sync:
            raise RuntimeError(
                f"{self._groups.where}step() inside no_sync(), whose gradients "
                "are not reduced. Leave it first."
            )
        self._step_applied = False
        if not self.settings.managed_accumulation or self.is_gradient_accumulation_boundary():
            self._update(lr_kwargs or {})
        elif self._uses_backward():  # also on a rank without this micro-batch
            with _dividing([self], self.loss_scale()), self.module.no_sync():
                pass
        self.micro_steps += 1

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        if self.settings.rejects_unused:
            self._check_used()
        known = self.optimizer.zero_core.knows_of_skipped_steps
        skipped = self.skipped_steps if known else 0
        with self._reports.timed("step"):
            # It may take part in backwards of other ranks.
            with _dividing([self] if self._uses_backward() else [], self.loss_scale()):
                self.optimizer.step()
            self.optimizer.zero_grad()
        self._divides()  # the loss scale may have changed
        self._step_applied = not known or self.skipped_steps == skipped
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self._samples_of_step()
        self._backwards = 0
        self._reports.after_step(self.global_samples, self.get_lr()[0], self.loss_scale())
        every = self.settings.steps_per_print
        if every and self.global_steps % every == 0 and self._groups.rank == 0:
            lr = self.get_lr()
            _log.info("step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, lr)

    def _samples_of_step(self) -> int:
        if self.settings.managed_accumulation:
            return self.settings.train_batch_size
        return self.settings.micro_batch_size * self.world_size * self._backwards

    def _check_used(self) -> None:
        """Raise where no rank's loss has reached a parameter that is to be stepped."""
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self.module.named_parameters():
            if id(parameter) in stepped and parameter.requires_grad and parameter.grad is None:
                raise RuntimeError(
                    f"{self._groups.where}no rank's loss has reached the parameter '{name}', and "
                    "config 'zero_optimization.ignore_unused_parameters' is false. Freeze it, or "
                    "leave the setting out."
                )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-batch is the last one of an accumulation.

        False with ``managed_gradient_accumulation`` false: only ``step()`` ends one then.
        """
        if not self.settings.managed_accumulation:
            return False
        if self._boundary is not None:
            return self._boundary
        return (self._counted() + 1) % self.settings.accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set the boundary for all micro-batches from now on. None: ``step()`` counts again."""
        if not self.settings.managed_accumulation:
            raise RuntimeError(
                f"{self._groups.where}set_gradient_accumulation_boundary() where config "
                "'managed_gradient_accumulation' is false: each step() is one. Leave the call out."
            )
        self._boundary = None if is_boundary is None else bool(is_boundary)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As the module's. ``step()`` inside it is an error."""
        before, self._in_no_sync = self._in_no_sync, True
        try:
            with self.module.no_sync():
                yield
        finally:
            self._in_no_sync = before

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards of one micro-batch may be inside. It changes nothing here: each adds
        what it reduces to the sums."""
        yield

    def destroy(self) -> None:
        """Make the module plain again (``zero_ext.unwrap``). Collective."""
        unwrap(self.module)
        status.forget(self.module)
        self.optimizer = self.lr_scheduler = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.optimizer is None:
            self.module.zero_grad(set_to_none)
        else:
            self.optimizer.zero_grad(set_to_none)

    # Data

    def deepspeed_io(
        self,
        dataset: Dataset,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader:
        """A loader of this rank's micro-batches, shuffled for ``route`` "train".

        An ``IterableDataset`` is read as it is: it must give each rank its own samples.
        """
        return data_loader(
            self.settings,
            self._groups,
            dataset,
            batch_size=batch_size or self.settings.micro_batch_size,
            shuffle=route == "train",
            pin_memory=pin_memory,
            sampler=data_sampler,
            collate_fn=collate_fn or self._collate_fn,
            num_workers=num_local_io_workers or 0,
        )
