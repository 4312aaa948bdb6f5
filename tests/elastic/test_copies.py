"""The file of a copy: what was written is read, and nothing else is."""

import errno
import os

import pytest
import torch

from zero_ext.elastic.copies import Copy, CopyFile, CopyName

OBJECTS = b"objects"


def values() -> dict[str, torch.Tensor]:
    """Of odd sizes, dtypes and memory orders, and without elements."""
    return {
        "odd": torch.randn(7, 13),
        "large": torch.randn(1083).bfloat16(),
        "images": torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
        "gaps": torch.randn(6, 4)[::2, ::3],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "number": torch.tensor(5),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
        "complex": torch.randn(5, dtype=torch.complex64),
    }


def read(copy: Copy) -> dict[str, torch.Tensor]:
    found = {}
    for key, entry in copy.entries.items():
        for first, flat in copy.elements(key, 0, entry.numel):
            assert first == 0
            found[key] = flat.as_strided(entry.shape, entry.strides)
    return found


@pytest.fixture(autouse=True)
def device():
    """Copies are on the host."""


def test_values_have_the_bits_that_were_written(tmp_path):
    written = values()
    CopyFile(tmp_path / "file").write(12, written, OBJECTS)
    copy = Copy(tmp_path / "file", checked=True)
    assert (copy.step, copy.objects) == (12, OBJECTS)
    found = read(copy)
    assert found.keys() == written.keys() - {"none"} and copy.entries["none"].shape == [0, 3]
    for key, value in found.items():
        assert value.dtype == written[key].dtype and torch.equal(value, written[key]), key


def test_a_part_of_a_value_is_read(tmp_path):
    written = {"odd": torch.arange(91.0)}
    CopyFile(tmp_path / "file").write(0, written, b"")
    [(first, found)] = Copy(tmp_path / "file", checked=True).elements("odd", 17, 400)
    assert first == 17 and torch.equal(found, written["odd"][17:])
    assert not [*Copy(tmp_path / "file", checked=True).elements("odd", 91, 400)]


def test_a_file_is_written_again_with_other_sizes(tmp_path):
    file = CopyFile(tmp_path / "file")
    for step, numel in enumerate((7, 1083, 40_000, 13)):
        written = {"x": torch.randn(numel), "step": torch.tensor(step)}
        file.write(step, written, OBJECTS * numel)
        copy = Copy(tmp_path / "file", checked=True)
        assert (copy.step, copy.objects) == (step, OBJECTS * numel)
        assert all(torch.equal(value, written[key]) for key, value in read(copy).items())


def cut_off(data: bytearray) -> None:
    del data[len(data) // 2 :]


def change_a_bit(data: bytearray) -> None:
    data[len(data) // 2] ^= 4


def change_the_step(data: bytearray) -> None:
    data[16] ^= 1


def stay_unfinished(data: bytearray) -> None:
    data[8:16] = bytes(8)


def be_another_file(data: bytearray) -> None:
    data[:] = b"hello"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_off, "not those that were written"),
        (change_a_bit, "not those that were written"),
        (change_the_step, "not those that were written"),
        (stay_unfinished, "its process ended while it was written"),
        (be_another_file, "it was cut off"),
    ],
)
def test_a_damaged_copy_is_not_read(damage, said, tmp_path):
    written = torch.randn(40_000)
    CopyFile(tmp_path / "file").write(3, {"x": written}, OBJECTS)
    data = bytearray((tmp_path / "file").read_bytes())
    damage(data)
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=said):
        Copy(tmp_path / "file", checked=True)


def test_a_full_folder_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    file = CopyFile(tmp_path / "file")
    file.write(1, {"x": torch.ones(3)}, b"")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        file.write(2, {"x": torch.ones(100_000)}, b"")
    assert Copy(tmp_path / "file", checked=True).step == 1


def test_a_tensor_of_unknown_memory_is_named(tmp_path):
    sparse = torch.nn.Parameter(torch.ones(2)).as_subclass(type("Other", (torch.Tensor,), {}))
    with pytest.raises(TypeError, match="'x' is a Other"):
        CopyFile(tmp_path / "file").write(1, {"x": sparse}, b"")


def test_names(tmp_path):
    name = CopyName("ab12", 3, 5, 1)
    assert CopyName.of(tmp_path / str(name)) == name
    with pytest.raises(ValueError):
        CopyName.of(tmp_path / "other.copy")
