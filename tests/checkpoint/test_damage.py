"""Damaged bytes are found by name, and no file of a checkpoint runs code."""

import dataclasses
import io
import itertools
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import changed, made, remove_digests, train
from harness import MLP, assert_bits, rank_data
from launching import run_on_ranks
from setups import values_of
from torch import nn

import zero_ext
from zero_ext import _C, checkpoint
from zero_ext.checkpoint import __main__ as command
from zero_ext.checkpoint import digests, files

HIDDEN = 13


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint"


@pytest.fixture
def saved(path):
    """One rank's model, whose checkpoint is at ``path``."""
    run = made(None, 2, MLP(HIDDEN))
    train(*run, 0, range(1))
    checkpoint.save(path, *run, extra={"count": 1})
    return run


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def reference_digest(data: bytes) -> int:
    """The formula of csrc/kernels/cpu/digest.cpp in whole numbers."""

    def following(lane, word, multiplier):
        return ((lane ^ (lane >> 29)) * multiplier + word) % 2**64

    data, size = data + bytes(-len(data) % 256), len(data)
    lanes = list(range(32))
    for start in range(0, len(data), 8):
        j = start // 8 % 32
        word = int.from_bytes(data[start : start + 8], "little")
        lanes[j] = following(lanes[j], word, 0x9E3779B97F4A7C15)
    for lane in lanes:
        size = following(size, lane, 0xC2B2AE3D27D4EB4F)
    return size


def test_the_digest_is_its_formula(instruction_set):
    for size in (0, 1, 7, 8, 255, 256, 257, 1083):
        data = os.urandom(size)
        assert _C.digest(data) == reference_digest(data), size


def test_the_digest_of_any_flipped_bit_differs():
    for data in (os.urandom(300), bytes(512), b"\x00\x00\x80\x3f" * 128):
        own = _C.digest(data)
        others = {_C.digest(flipped(data, bit)) for bit in range(8 * len(data))}
        assert own not in others and len(others) == 8 * len(data)
        assert own != _C.digest(flipped(flipped(data, 63), 63 + 2048))  # two signs of one lane
    ones = b"\x00\x00\x80\x3f" * 4096
    assert _C.digest(ones) != _C.digest(bytes(4096) + ones[4096:])


def test_streams_of_any_sizes_agree(tmp_path, monkeypatch):
    """Written in any portions, and read at any position in any portions."""
    monkeypatch.setattr(digests, "BLOCK", 64)
    data = os.urandom(1083)
    cuts = [0, 1, 64, 65, 300, 300, 700, 1083]
    written = digests.DigestingFiles()
    with written.create_stream(tmp_path / "f", "wb") as stream:
        for begin, end in itertools.pairwise(cuts):
            stream.write(data[begin:end])
            if end in (65, 700):
                assert stream.tell() == end
    pieces = sorted(written.pieces.values())
    assert [piece[:2] for piece in pieces] == [(0, 65), (65, 635), (700, 383)]
    for piece in pieces:
        assert piece.digests == digests.of(data[piece.offset : piece.offset + piece.length])
    with open(tmp_path / "f", "rb", buffering=0) as file:
        stream = digests.CheckedStream(file, pieces, None)
        for begin in range(0, 1083, 7):
            for size in (1, 63, 64, 65, 130):
                stream.seek(begin)
                end = min(begin + size, 1083)
                assert stream.read(end - begin) == data[begin:end] and stream.tell() == end


def test_flipped_bits_are_found_by_name(path, saved, capsys):
    assert command.main(["verify", str(path)]) == 0
    metadata = files.CheckedReader(path).metadata
    model, optimizer = made(None, 3, changed(MLP(HIDDEN)))
    before = values_of(model)
    for index, place in metadata.storage_data.items():
        file = path / place.relative_path
        data = file.read_bytes()
        for byte in (0, 1, place.length // 3, place.length // 2, place.length - 1):
            file.write_bytes(flipped(data, 8 * (place.offset + byte) + 5))
            assert command.main(["verify", str(path)]) == 1
            assert capsys.readouterr().out.endswith(f"damaged: {index.fqn}\n")
            assert files.damaged_entries(path) == [index.fqn]
        if index.fqn.startswith("optimizer.param_groups."):  # torch alone reads it
            file.write_bytes(data)
            continue
        file.write_bytes(flipped(data, 8 * (place.offset + place.length // 2)))
        with pytest.raises(RuntimeError, match=rf"bytes of '{index.fqn}' in .* are not those"):
            checkpoint.load(path, model, optimizer)
        file.write_bytes(data)
    for name, value in values_of(model).items():
        assert_bits(value, before[name], name)
    assert checkpoint.load(path, model, optimizer) == {"count": 1}
    for name, value in values_of(saved[0]).items():
        assert_bits(values_of(model)[name], value, name)


@pytest.mark.parametrize("checked", [True, False], ids=["digests", "old"])
def test_damaged_metadata_names_the_path(path, saved, checked):
    if not checked:
        remove_digests(path)
    file = path / ".metadata"
    data = file.read_bytes()
    for damage in (b"", data[:1], data[: len(data) // 2], data[:-1], data[::-1], b"\x80" * 40):
        file.write_bytes(damage)
        with pytest.raises(ValueError, match=rf"'{file}' of {len(damage)} bytes .*Load an earlier"):
            checkpoint.load(path, *saved)
        assert command.main(["verify", str(path)]) == 1
    file.write_bytes(data)
    checkpoint.load(path, *saved)


def test_damaged_digests_and_truncated_files(path, saved):
    file = path / digests.FILE
    data = file.read_bytes()
    for damage in (b"", data[:-1], flipped(data, 3), flipped(data, 8 * 60)):
        file.write_bytes(damage)
        with pytest.raises(ValueError, match=rf"'{file}' is damaged"):
            checkpoint.load(path, *saved)
    file.write_bytes(data)
    [values] = path.glob("*.distcp")
    whole = values.read_bytes()
    for size in (0, 100, len(whole) - 1):
        values.write_bytes(whole[:size])
        with pytest.raises(RuntimeError, match="are not those that were saved"):
            checkpoint.load(path, *saved)
        assert files.damaged_entries(path)
    values.unlink()
    assert len(files.damaged_entries(path)) > 10


def test_large_tensors_have_several_blocks(path):
    model = zero_ext.shard(nn.Linear(1083, 700), 2)
    checkpoint.save(path, model)
    weight = max(
        files.CheckedReader(path).metadata.storage_data.values(), key=lambda place: place.length
    )
    assert weight.length > 2 * digests.BLOCK
    file = path / weight.relative_path
    data = file.read_bytes()
    checkpoint.load(path, model)
    for byte in (digests.BLOCK - 1, digests.BLOCK, 2 * digests.BLOCK + 7, weight.length - 1):
        file.write_bytes(flipped(data, 8 * (weight.offset + byte)))
        with pytest.raises(RuntimeError, match=r"bytes of 'model\.weight'"):
            checkpoint.load(path, model)


def test_without_digests_it_is_loaded_and_verify_says_so(path, saved, capsys):
    remove_digests(path)
    assert checkpoint.load(path, *saved) == {"count": 1}
    assert command.main(["verify", str(path)]) == 1
    assert "has no digests" in capsys.readouterr().err


def test_the_command_runs(path, saved):
    root = Path(__file__).parents[2]
    done = run_on_ranks(1, "-m", "zero_ext.checkpoint", "verify", str(path), cwd=root)
    assert done.returncode == 0 and "is as it was written" in done.stdout


# Code in a file


class Payload:
    """Runs a function where it is unpickled."""

    def __reduce__(self):
        return run, ("here",)

    def __deepcopy__(self, memo):
        return self


ran: list[str] = []  # where a payload was unpickled


def run(where):
    ran.append(where)


class Remembers(nn.Linear):
    def __init__(self, extra):
        super().__init__(3, 3)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def in_metadata(path, model):
    checkpoint.save(path, model)
    (path / digests.FILE).unlink()
    (path / ".metadata").write_bytes(pickle.dumps(Payload()))


def in_extra(path, model):
    checkpoint.save(path, model, extra={"schedule": Payload()})


def in_an_extra_state(path, model):
    model.extra = Payload()
    checkpoint.save(path, model)
    model.extra = 0


def in_torchs_entry(path, model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {**nn.Linear(3, 3).state_dict(), "_extra_state": Payload()}
        dcp.save({"model": state}, checkpoint_id=path, no_dist=True)


def write_by_hand(path, objects):
    """A checkpoint of a Linear with these objects."""
    entries = {"zero_ext": objects, "zero_ext.extra": {}}
    for key, value in entries.items():
        torch.save(value, buffer := io.BytesIO())
        entries[key] = buffer.getvalue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": nn.Linear(3, 3).state_dict(), **entries}
        dcp.save(state, checkpoint_id=path, no_dist=True)


def in_the_objects(path, _):
    model = {"_extra_state": Payload()}
    write_by_hand(path, {"format": 3, "ranks": 1, "model": model, "optimizers": []})


@pytest.mark.parametrize("written", [None, 2, 4])
def test_another_format_is_named(tmp_path, written):
    model = zero_ext.shard(nn.Linear(3, 3), 2)
    before = values_of(model)
    write_by_hand(tmp_path / "c", {"format": written, "model": {}, "optimizers": []})
    with pytest.raises(ValueError, match=rf"has format {written}, this version reads format 3"):
        checkpoint.load(tmp_path / "c", model)
    for a, e in zip(values_of(model).values(), before.values(), strict=True):
        assert_bits(a, e)


@pytest.mark.parametrize(
    "place", [in_metadata, in_extra, in_an_extra_state, in_torchs_entry, in_the_objects]
)
def test_no_file_runs_code(tmp_path, place):
    model = zero_ext.shard(Remembers(0), 2)
    path = tmp_path / "c"
    place(path, model)
    ran.clear()
    message = "Load an earlier" if place is in_metadata else "allow_pickle=True"
    with pytest.raises((ValueError, RuntimeError), match=message):
        checkpoint.load(path, model, strict=False)
    if place is not in_torchs_entry:
        with pytest.raises(ValueError, match=message):
            checkpoint.read_whole(path)
    assert not ran
    if place is not in_metadata:
        checkpoint.load(path, model, allow_pickle=True, strict=False)
        assert ran


class Schedule:
    """As a user's class that is saved in ``extra``."""

    def __init__(self, count):
        self.count = count


def test_extra_that_is_no_plain_data(path):
    model = zero_ext.shard(MLP(HIDDEN), 2)
    plain = {"a": [1, 2.5, None], "b": {"c": (True, b"x")}, "t": rank_data((3,), 0)}
    checkpoint.save(path, model, extra=plain)
    found = checkpoint.load(path, model)
    assert_bits(found.pop("t"), plain.pop("t"))
    assert found == plain
    checkpoint.save(path, model, extra={"schedule": Schedule(3)})
    with pytest.raises(ValueError, match=r"'zero_ext.extra' .* holds objects of .*Schedule, and"):
        checkpoint.load(path, model)
    assert checkpoint.load(path, model, allow_pickle=True)["schedule"].count == 3
    with torch.serialization.safe_globals([Schedule]):
        assert checkpoint.load(path, model)["schedule"].count == 3


# Files that are missing or lie elsewhere


def test_a_lost_file_of_digests_is_named(path, saved):
    (path / digests.FILE).unlink()
    match = rf"lacks the file '{digests.FILE}'.*Copy all files"
    with pytest.raises(ValueError, match=match):
        checkpoint.load(path, *saved)
    with pytest.raises(ValueError, match=match):
        checkpoint.read_whole(path)
    assert command.main(["verify", str(path)]) == 1


@pytest.mark.parametrize("place", ["../stolen", "/etc/passwd", "a/b", "..", "", "a\\b", None])
def test_an_entry_outside_of_the_folder_is_refused(path, saved, place):
    remove_digests(path)
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    key = next(iter(metadata.storage_data))
    metadata.storage_data[key] = dataclasses.replace(
        metadata.storage_data[key], relative_path=place
    )
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=rf"'{key.fqn}' lies in .*not the name of a file"):
        checkpoint.load(path, *saved)
