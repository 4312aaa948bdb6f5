"""Folders of saves to one path: every order of their steps, and a death at every step."""

import contextlib
import os
import shutil

import pytest
from checkpoints import made
from harness import MLP

from zero_ext import checkpoint
from zero_ext.checkpoint import folders


class DiedError(BaseException):
    """As a kill: nothing catches it."""


class Steps:
    """Calls ``before`` ahead of step ``at`` of the file system's calls that change something."""

    def __init__(self, monkeypatch):
        self.at, self.before, self.count = -1, None, 0
        for module, name in (
            (os, "rename"),
            (os, "mkdir"),
            (os, "unlink"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, call):
        def counted(*args, **kwargs):
            before, here = self.before, self.count == self.at
            self.count += 1
            if before is not None and here:
                self.before = None  # what it calls has no steps of this kind
                before()
            return call(*args, **kwargs)

        return counted

    def run(self, act, at=-1, before=None) -> int:
        """The number of steps that ``act`` has begun."""
        self.at, self.before, self.count = at, before, 0
        act()
        count, self.before = self.count, None
        return count


def die():
    raise DiedError


def save(path, what, made_folders=None):
    new = folders.NewFolder(path, what)
    try:
        new.make()
        (new.folder / "__0_0.distcp").write_text(what)
        (new.folder / ".metadata").write_text(what)
        new.commit()
    except DiedError:
        new.release()
        raise


def killed_save(path, what):
    with pytest.raises(DiedError):
        save(path, what)


def loaded(path) -> str:
    found = folders.find(path)
    what = (found / ".metadata").read_text()
    assert (found / "__0_0.distcp").read_text() == what
    return what


@pytest.fixture
def steps(monkeypatch):
    return Steps(monkeypatch)


@pytest.fixture
def counted(steps, tmp_path):
    """The number of steps of a save over another one."""
    save(tmp_path / "count" / "c", "x")
    return steps.run(lambda: save(tmp_path / "count" / "c", "y"))


def prepared(tmp_path, number):
    path = tmp_path / f"run {number}" / "c"
    save(path, "old")
    (path / "notes").write_text("mine")
    return path


def assert_clean(path, what):
    """A later save works, and leaves nothing beside the checkpoint and the user's file."""
    assert loaded(path) in what
    save(path, "later")
    assert loaded(path) == "later" and (path / "notes").read_text() == "mine"
    assert [each.name for each in path.parent.iterdir()] == ["c"]
    assert {each.name for each in path.iterdir()} == {".metadata", "__0_0.distcp", "notes"}


def test_two_saves_in_every_order(tmp_path, steps, counted):
    assert counted >= 6
    for at in range(counted):
        path = prepared(tmp_path, at)
        steps.run(lambda path=path: save(path, "a"), at, lambda path=path: save(path, "b"))
        assert_clean(path, {"a", "b"})


def test_a_save_that_dies_at_any_step(tmp_path, steps, counted):
    for at in range(counted):
        path = prepared(tmp_path, at)
        steps.run(lambda path=path: killed_save(path, "a"), at, die)
        assert_clean(path, {"old", "a"})


def test_one_dies_while_the_other_is_at_any_step(tmp_path, steps, counted):
    """``b`` begins and dies at step ``dies`` while ``a`` is before step ``at``; then ``a`` ends."""
    for at in range(counted):
        for dies in range(counted):
            path = prepared(tmp_path, (at, dies))

            def other(path=path, dies=dies):
                seen = steps.count
                steps.run(lambda: maybe_killed(path), dies, die)
                steps.count = seen

            steps.run(lambda path=path: save(path, "a"), at, other)
            assert_clean(path, {"a", "b"})


def maybe_killed(path):
    with contextlib.suppress(DiedError):
        save(path, "b")


def test_what_a_running_save_writes_is_not_removed(tmp_path):
    path = tmp_path / "c"
    running = folders.NewFolder(path, "running")
    running.make()
    dead = folders.NewFolder(path, "dead")
    dead.make()
    dead.release()
    save(path, "b")
    assert running.folder.exists() and not dead.folder.exists()
    (running.folder / ".metadata").write_text("a")
    running.commit()
    assert (path / ".metadata").read_text() == "a"


def test_leftovers_refuse_no_save(anywhere, rank, path):
    """Files without metadata at the path, as a killed save of torch's own leaves them."""
    model = made(anywhere, 2, MLP(13))[0]
    path.mkdir(parents=True, exist_ok=True)
    (path / f"__{rank}_0.distcp").write_text("half")
    checkpoint.save(path, model, extra={"a": 1})
    assert checkpoint.load(path, model) == {"a": 1}
    # A death between the two renames.
    if anywhere is None:
        os.rename(path, path.with_name(f".{path.name}.zero_ext-replaced-x"))
        assert checkpoint.load(path, model) == {"a": 1}
        checkpoint.save(path, model, extra={"a": 2})
        assert [each.name for each in path.parent.iterdir()] == [path.name]
