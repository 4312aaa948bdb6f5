"""Run: a training that goes on after ranks were lost, from what ranks keep in memory."""

import logging
import os
import re
import secrets
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_ext._warnings import warn
from zero_ext.checkpoint import failures, loading, pickles, saving
from zero_ext.checkpoint.folders import numbered
from zero_ext.checkpoint.optimizer_states import listed
from zero_ext.checkpoint.rank_values import EXTRA
from zero_ext.elastic import in_place
from zero_ext.elastic.keeping import Keeper, Partners
from zero_ext.elastic.restoring import contents_of, from_all_ranks, newest_copies
from zero_ext.engine.checks import check_count
from zero_ext.ranks.comm_groups import store_of
from zero_ext.state.model_state import ModelState, groups_of, refuse_meshes

_WHAT = "elastic.Run()"
_TERMINATED = 128 + signal.SIGTERM  # what a shell says of a process that SIGTERM has ended
_SIGTERM, _JOIN = "a rank has got SIGTERM", "another process wants to take part"
_log = logging.getLogger(__name__)


class Run:
    """Keeps a copy of each finished step in host memory, and begins with the newest one.

    ::

        with zero_ext.elastic.Run(model, optimizer, extra={"batches": batches}) as run:
            for epoch in range(batches.epoch, epochs):
                batches.set_epoch(epoch)
                for step in batches.steps(loader, model):
                    ...
                    optimizer.step(divide_by=len(step))
                    optimizer.zero_grad()
                    run.keep()

    At its beginning the model, the optimizer and ``extra`` get the state after the newest step of
    which every rank's copy is whole in the memory of some host. The number of ranks may have
    changed. A newer checkpoint in ``checkpoints`` goes first. Without either, all stay as they are.
    Copies are removed at the end of the block, if nothing was raised in it.

    Args:
        model: Sharded.
        optimizer: Of its parameters, or several.
        extra: Objects with ``state_dict`` and ``load_state_dict``, by name: batches, schedules.
        checkpoints: A folder that all ranks share, for checkpoints ``step<number>``.
        save_every: Steps between two of them. One is also saved after SIGTERM.
        run_id: Names the run: copies of other runs are never loaded. Default: torchrun's
            ``--rdzv-id``, or Slurm's job.
        folder: In host memory. Each host has its own.
        buddy: With several hosts each rank's copy is also kept on the next host. It survives the
            loss of a host.
    Attributes:
        step: How many steps are finished, of the whole training.
        source: Where the state came from: "memory", a checkpoint's path, or None.
    Raises:
        ValueError, TypeError: an argument makes no sense, or the run has no id.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        *,
        extra: dict[str, Any] | None = None,
        checkpoints: str | os.PathLike | None = None,
        save_every: int | None = None,
        run_id: str | None = None,
        folder: str | os.PathLike = "/dev/shm",
        buddy: bool = True,
    ):
        self._model, self._optimizers = model, listed(optimizer)
        self._extra = {} if extra is None else dict(extra)
        for name, each in self._extra.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(
                    f"zero_ext: extra['{name}'] is a {type(each).__name__}, without state_dict() "
                    "and load_state_dict(). Pass objects that have both."
                )
        if (save_every is None) != (checkpoints is None):
            raise ValueError(
                "zero_ext: elastic.Run takes checkpoints and save_every together, or neither."
            )
        if save_every is not None:
            check_count("save_every", save_every)
        self._checkpoints = None if checkpoints is None else Path(checkpoints)
        self._save_every, self._buddy = save_every, buddy
        self._members = in_place.current_members()
        self._folder = Path(folder) / f"zero_ext-{_checked_id(run_id, self._members)}"
        _warn_of_shared_store()
        self._asked_to_end, self._handler = False, None
        self.step, self.source = 0, None

    def __enter__(self) -> "Run":
        """Collective.

        Raises:
            ValueError, RuntimeError: what is there cannot be loaded.
        """
        groups = self._groups = groups_of(self._model)
        with failures.together(groups, _WHAT):
            refuse_meshes(self._model, _WHAT)
            _make_folder(self._folder)
        hosts = from_all_ranks(_host_of(self._folder), groups)
        peers = None
        if len(set(hosts)) > 1:
            peers = dist.new_group(dist.get_process_group_ranks(groups.parent), backend="gloo")
        self._restore(hosts, peers)
        era = from_all_ranks(secrets.token_hex(8), groups)[0]
        partners = Partners.of(groups.rank, hosts) if self._buddy else Partners(None, ())
        self._keeper = Keeper(self._folder, era, groups, partners, peers)
        self._store = None
        if groups.world > 1:
            self._store = dist.PrefixStore(f"zero_ext/{era}", store_of(groups))
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._ask_to_end)
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
        if kind is None:  # the training is finished
            from_all_ranks(None, self._groups)
            shutil.rmtree(self._folder, ignore_errors=True)

    def stats(self) -> dict[str, int]:
        """``steps``: see ``step``. ``bytes_copies``: the host memory that this rank's copies take,
        with those that it keeps for ranks of other hosts."""
        return {"steps": self.step, "bytes_copies": self._keeper.nbytes}

    def keep(self) -> None:
        """Keep the state after a step. Call it on every rank, after ``zero_grad()``.

        Raises:
            SystemExit: SIGTERM has come, and the step is finished.
        """
        self.step += 1
        self._copy()
        if self._members is not None:
            self._members.failures = 0
        because = self._reason_to_end()
        due = self._save_every is not None and self.step % self._save_every == 0
        if due or (because == _SIGTERM and self._checkpoints is not None):
            self._save()
        if not because:
            return
        _log.warning("%sends after step %d: %s", self._groups.where, self.step, because)
        if self._members is not None and not self._asked_to_end:
            raise in_place.NewRound
        raise SystemExit(_TERMINATED)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _copy(self) -> None:
        _, state, objects = saving.held_state(self._model, self._optimizers, self._groups)
        values = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        objects["extra"], apart = pickles.set_apart(self._extra_now(), EXTRA)
        self._keeper.keep(self.step, values | apart, pickles.pickled(objects))

    def _extra_now(self) -> dict[str, Any]:
        states = {name: each.state_dict() for name, each in self._extra.items()}
        return {"step": self.step, "states": states}

    # ---- The end ----

    def _ask_to_end(self, *signal_and_frame: Any) -> None:
        self._asked_to_end = True

    def _reason_to_end(self) -> str:
        """Why all ranks end after this step, or nothing.

        A rank that wants it after step s says that all end after step s + 1. No rank finishes that
        one before it was said, so all ranks read the same.
        """
        own = _SIGTERM if self._asked_to_end else ""
        listens = self._members is not None and self._groups.rank == 0
        if not own and listens and self._members.are_asked():
            own = _JOIN
        if self._store is None:
            return own
        if own:
            said = self._store.compare_set("end", "", f"{self.step + 1} {own}")
        elif self._store.check(["end"]):
            said = self._store.get("end")
        else:
            return ""
        step, _, reason = said.decode().partition(" ")
        return reason if int(step) <= self.step else ""

    # ---- The beginning, and checkpoints ----

    def _restore(self, hosts: list[str], peers: Any) -> None:
        model, groups = self._model, self._groups
        copies = newest_copies(self._folder, ModelState.of(model, self._optimizers), hosts, groups)
        number, path = from_all_ranks(self._newest_checkpoint(), groups)[0]
        if copies is not None and copies.step >= number:
            extra = loading.load_contents(
                _WHAT,
                groups,
                lambda: contents_of(copies, peers, groups),
                model,
                self._optimizers,
                allow_pickle=True,
            )
            self.source = "memory"
        elif path is not None:
            extra = loading.load(path, model, self._optimizers)
            self.source = str(path)
        else:
            return
        _check_names(extra.get("states"), self._extra, self.source)
        for name, each in self._extra.items():
            each.load_state_dict(extra["states"][name])
        self.step = extra["step"]
        _log.info("%sgoes on after step %d, from %s", groups.where, self.step, self.source)

    def _newest_checkpoint(self) -> tuple[int, Path | None]:
        found = [] if self._checkpoints is None else numbered(self._checkpoints)
        own = [(step, path) for step, path in found if path.name == f"step{step}"]
        return own[-1] if own else (-1, None)

    def _save(self) -> None:
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        path = self._checkpoints / f"step{self.step}"
        saving.save(path, self._model, self._optimizers, extra=self._extra_now())


def _checked_id(run_id: str | None, members: Any) -> str:
    """
    Raises:
        ValueError: there is none, or it cannot be in a file's name.
    """
    if run_id is None and members is not None:
        run_id = members.run_id
    if run_id is None:
        launcher = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        run_id = os.environ.get("SLURM_JOB_ID") if launcher == "none" else launcher
    if run_id is None or not re.fullmatch(r"[\w.-]+", run_id):
        raise ValueError(
            f"zero_ext: a run's id has letters, digits and any of '_.-', and is not {run_id!r}. "
            "Pass run_id, or start torchrun with --rdzv-id."
        )
    return run_id


def _check_names(saved: Any, here: dict[str, Any], source: str | None) -> None:
    if not isinstance(saved, dict) or saved.keys() != here.keys():
        names = sorted(saved) if isinstance(saved, dict) else saved
        raise ValueError(
            f"zero_ext: elastic.Run has extra={sorted(here)}, and the state that is loaded from "
            f"{source} has {names}. Pass the same names."
        )


def _warn_of_shared_store() -> None:
    """See https://github.com/pytorch/pytorch/issues/135712."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        warn(
            "zero_ext: torchrun's restarts may hang, because the new processes find the addresses "
            "of the old ones. Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
        )


def _make_folder(folder: Path) -> None:
    """
    Raises:
        RuntimeError: it is another user's.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(
            f"zero_ext: '{folder}' belongs to another user, whose copies are not loaded. Pass "
            "another run_id."
        )


def _host_of(folder: Path) -> str:
    """A name that is equal on all ranks that share ``folder``, and on no other."""
    own, common = folder / f"{secrets.token_hex(8)}.host", folder / "host"
    own.write_text(own.stem)
    try:
        os.link(own, common)
    except FileExistsError:  # another rank was faster
        pass
    finally:
        own.unlink()
    return common.read_text()
