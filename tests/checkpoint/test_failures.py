"""What goes wrong around a checkpoint: each message names the path, the rank and one remedy."""

import errno
import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoints import changed, made
from harness import MLP, assert_bits, gather_objects, needs_one_dimension
from launching import run_on_ranks
from setups import values_of
from torch.distributed.device_mesh import DeviceMesh

from zero_ext import checkpoint
from zero_ext.checkpoint import __main__ as command
from zero_ext.checkpoint import digests, files, folders


def barrier(mesh) -> None:
    if mesh is not None:
        dist.barrier(mesh.get_group())


# Paths


def nothing(path):
    return path / "step-50" / "new", f"only '{path}' exists. Pass the path that was given to save"


def a_pt_file(path):
    (path / "model.pt").write_bytes(b"PK")
    return path / "model.pt", "is a file; a checkpoint is a folder. Read the file with the library"


def a_file_of_it(path):
    return path / "step-40" / ".metadata", f"Pass its folder '{path / 'step-40'}'"


def below_a_file(path):
    (path / "a.pt").touch()
    return path / "a.pt" / "step-40", f"only '{path / 'a.pt'}' exists"


def the_parent(path):
    return path, f"it holds 2 checkpoints. Pass one of them; the newest is '{path / 'step-40'}'"


def without_metadata(path):
    (path / "step-40" / ".metadata").unlink()
    return path / "step-40", "no whole checkpoint at .* lacks the file '.metadata'. Load an earlier"


def an_empty_folder(path):
    (path / "step-60").mkdir()
    return path / "step-60", "the folder is empty. Pass the path"


def another_folder(path):
    (path / "hub").mkdir()
    (path / "hub" / "model.safetensors").touch()
    return path / "hub", "it holds 'model.safetensors' and no '.metadata'. Pass the path"


WRONG = [
    nothing,
    a_pt_file,
    a_file_of_it,
    below_a_file,
    the_parent,
    without_metadata,
    an_empty_folder,
    another_folder,
]


def test_what_is_no_checkpoint_is_told_with_a_remedy(anywhere, rank, path, capsys):
    run = made(anywhere, 2, MLP(13))
    before = {name: value.clone() for name, value in values_of(run[0]).items()}
    for number, place in enumerate(WRONG):
        parent = path.parent / str(number)
        for step in (9, 40):
            checkpoint.save(parent / f"step-{step}", *run)
        found = [place(parent) if rank == 0 else None]
        if anywhere is not None:
            dist.broadcast_object_list(found, 0, anywhere.get_group())
        wrong, message = found[0]
        where = "zero_ext: " if anywhere is None else rf"zero_ext \[rank {rank}\]: "
        with pytest.raises(ValueError, match=f"^{where}.*{message}") as error:
            checkpoint.load(wrong, *run)
        assert f"'{wrong}'" in str(error.value)
        with pytest.raises(ValueError, match=message):
            checkpoint.read_whole(wrong)
        assert command.main(["verify", str(wrong)]) == 1
        assert re.search(message, capsys.readouterr().err)
        barrier(anywhere)
    for name, value in values_of(run[0]).items():
        assert_bits(value, before[name], name)


def test_a_save_over_something_else_says_where_to_save(tmp_path):
    path = tmp_path / "c"
    run = made(None, 2, MLP(13))
    for name in ("step-9", "step-40"):
        checkpoint.save(path / name, *run)
    with pytest.raises(ValueError, match=r"other checkpoints, such as 'step-40', .* in it"):
        checkpoint.save(path, *run)
    (path / "a.pt").touch()
    with pytest.raises(ValueError, match=r"a.pt' is a file; .* Choose another path"):
        checkpoint.save(path / "a.pt", *run)
    message = f"save.. of checkpoint '{path}/a.pt/b': .*Error: .* Choose a path of which no part"
    with pytest.raises(RuntimeError, match=message):
        checkpoint.save(path / "a.pt" / "b", *run)
    with pytest.raises(RuntimeError, match=r"File name too long.* Choose a shorter name"):
        checkpoint.save(path / ("a" * 300), *run)


@pytest.mark.parametrize("call", [checkpoint.save, checkpoint.load])
def test_a_path_is_text(call):
    run = made(None, 2, MLP(13))
    for wrong in (5, b"step-40", None, ["step-40"]):
        with pytest.raises(TypeError, match=f"is {re.escape(repr(wrong))}, a .* Pass a str"):
            call(wrong, *run)
        with pytest.raises(TypeError, match=r"Pass a str or a pathlib\.Path"):
            checkpoint.read_whole(wrong)


# File systems


class Full:
    """The calls of the file system that fail from the one numbered ``at`` on."""

    def __init__(self, monkeypatch, number):
        self.number, self.at, self.calls = number, None, 0
        for owner, name in (
            (digests._DigestingStream, "_write"),
            (os, "mkdir"),
            (os, "fsync"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call):
        def counted(*args, **kwargs):
            self.calls += 1
            if self.at is not None and self.calls > self.at:
                raise OSError(self.number, os.strerror(self.number))
            return call(*args, **kwargs)

        return counted

    def run(self, act, at=None) -> int:
        self.at, self.calls = at, 0
        try:
            act()
            return self.calls
        finally:
            self.at = None


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "No space left on device. Free space there, or use another file system"),
        (errno.EDQUOT, "Disk quota exceeded. Free space there"),
        (errno.EROFS, "Read-only file system. Use a folder that this user may read and write"),
    ],
)
def test_a_full_disk_is_told_at_every_call(anywhere, rank, path, monkeypatch, number, remedy):
    """Also inside torch's zip files, which hide it."""
    run = made(anywhere, 2, MLP(13))
    checkpoint.save(path, *run, extra={"which": "old"})
    full = Full(monkeypatch, number)
    calls = full.run(lambda: checkpoint.save(path, *run, extra={"which": "old"}))
    limits = [calls - 2]  # the last two make renames durable, which some file systems cannot
    if anywhere is not None:
        limits = gather_objects(calls if rank else calls - 2)
    for who, limit in enumerate(limits):
        assert limit > 10
        for at in (0, 1, limit // 3, 2 * limit // 3, limit - 1):
            with pytest.raises(RuntimeError) as error:
                full.run(
                    lambda: checkpoint.save(path, *run, extra={"which": "new"}),
                    at if rank == who or anywhere is None else None,
                )
                raise RuntimeError("nothing was raised")
            text = str(error.value)
            where = "zero_ext" if anywhere is None else f"zero_ext [rank {rank}]"
            assert text.startswith(where) and text.count("zero_ext") <= 2, text
            assert f"save() of checkpoint '{path}'" in text and remedy in text, text
            assert anywhere is None or f"rank {who}" in text, text
            barrier(anywhere)
            assert [each.name for each in path.parent.iterdir()] == ["checkpoint"]
    again = made(anywhere, 2, changed(MLP(13)))
    assert checkpoint.load(path, *again) == {"which": "old"}
    checkpoint.save(path, *run, extra={"which": "new"})
    assert checkpoint.load(path, *again) == {"which": "new"}


def test_a_load_names_what_the_file_system_says(tmp_path, monkeypatch):
    path = tmp_path / "c"
    run = made(None, 2, MLP(13))
    checkpoint.save(path, *run)

    def denied(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", "x.distcp")

    for owner, name in (
        (digests.CheckedStream, "_read_block"),
        (digests, "read"),
        (folders, "is_checkpoint"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, denied)
            for load in (lambda: checkpoint.load(path, *run), lambda: checkpoint.read_whole(path)):
                with pytest.raises(RuntimeError, match=f"'{path}': PermissionError: .* Use a fold"):
                    load()


def test_a_load_reads_the_metadata_once(tmp_path, monkeypatch):
    path = tmp_path / "c"
    run = made(None, 2, MLP(13))
    checkpoint.save(path, *run, extra={"count": 1})
    made_readers, init = [], files.CheckedReader.__init__
    monkeypatch.setattr(
        files.CheckedReader,
        "__init__",
        lambda self, *args: (made_readers.append(self), init(self, *args))[1],
    )
    assert checkpoint.load(path, *run) == {"count": 1}
    assert len(made_readers) == 1
    checkpoint.read_whole(path)
    assert len(made_readers) == 2


# Ranks that end

DYING = """
import os, pathlib, sys
from datetime import timedelta
import torch, torch.distributed as dist, zero_ext
from zero_ext import checkpoint
from zero_ext.checkpoint import files, folders

folder = pathlib.Path(sys.argv[1])

def end(*args, **kwargs):
    os._exit(0)

def run(case, rank, dies):
    store = f"file://{folder}/store-{case}"
    dist.init_process_group("gloo", store, timedelta(seconds=20), rank=rank, world_size=2)
    model = zero_ext.shard(torch.nn.Linear(13, 7), 2)
    path = folder / case / "c"
    checkpoint.save(path, model, extra={"count": 1})
    if rank == dies:
        if case == "calling":
            end()
        owner, name = {
            "writing": (files.DigestingWriter, "write_data"),
            "ending": (files.DigestingWriter, "finish"),
            "renaming": (folders.NewFolder, "commit"),
        }[case]
        setattr(owner, name, end)
    try:
        checkpoint.save(path, model, extra={"count": 2})
    except RuntimeError as error:
        (folder / f"{case}.txt").write_text(str(error))
    os._exit(0)

for case, dies in (("calling", 1), ("writing", 1), ("ending", 0), ("renaming", 0)):
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            run(case, rank, dies)
    for child in children:
        os.waitpid(child, 0)
"""


def test_a_rank_that_ends_inside_a_save_is_told(tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    began = time.monotonic()
    root = Path(__file__).parents[2]
    done = run_on_ranks(1, str(script), str(tmp_path), cwd=root, timeout_s=50)
    for case, alive in (("calling", 0), ("writing", 0), ("ending", 1), ("renaming", 1)):
        path = tmp_path / case / "c"
        assert (tmp_path / f"{case}.txt").exists(), (case, done.stderr[-2000:])
        text = (tmp_path / f"{case}.txt").read_text()
        assert text.startswith(f"zero_ext [rank {alive}]: save() of checkpoint '{path}'"), text
        assert "Another rank has ended" in text, text
        assert checkpoint.read_whole(path)[1] == {"count": 1}, case
        checkpoint.save(path, made(None, 2, MLP(13))[0])
        assert [each.name for each in path.parent.iterdir()] == ["c"], case
    assert time.monotonic() - began < 45  # nobody has waited for a timeout


@pytest.mark.dist
@pytest.mark.world(min=2)
def test_a_save_that_a_rank_does_not_call_ends_with_the_timeout(rank, shared_path, group):
    needs_one_dimension()
    short = dist.new_group(timeout=timedelta(seconds=1))
    model = made(DeviceMesh.from_group(short, "cpu"), 2, MLP(13))[0]
    path = shared_path / "c"
    if rank == 0:
        with pytest.raises(
            RuntimeError, match=rf"rank 0\]: save\(\) of checkpoint '{path}' waited"
        ):
            checkpoint.save(path, model)
    dist.barrier(group)
    assert not path.exists()
