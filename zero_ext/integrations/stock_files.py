"""Files that accelerate's and transformers' own loops write, and what they find in folders of ours.

Note [What a stock loop finds]
A folder of this package must not be resumed by half without a word. accelerate's own
``load_state()`` raises, as the weights of a sharded model are in no file that it reads. The
Trainer of transformers would begin its optimizer anew where there is no ``optimizer.pt``. So
``write_placeholder()`` leaves one that only raises.
"""

import os
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


def read(path: Path) -> dict[str, Any] | None:
    """A state that was saved by ``torch.save``, if it is there. It is mapped: a rank copies its
    part alone."""
    if not path.is_file():
        return None
    with torch.serialization.safe_globals([optimizer_is_in_the_folder_zero_ext]):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def optimizer_is_in_the_folder_zero_ext() -> NoReturn:
    """The call of a placeholder. torch shows this name where it unpickles nothing unasked.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "zero_ext: the optimizer's state of this checkpoint is in its folder 'zero_ext', and its "
        "'optimizer.pt' only says so. Resume with zero_ext.integrations.transformers.Trainer, or "
        "remove 'optimizer.pt' to begin the optimizer anew."
    )


class _Placeholder:
    def __reduce__(self) -> tuple:
        return optimizer_is_in_the_folder_zero_ext, ()


def write_placeholder(path: Path) -> None:
    torch.save(_Placeholder(), path)


def is_of_accelerate(folder: str | os.PathLike) -> bool:
    """Whether accelerate's own ``save_state()`` has written ``folder``, and not ours.

    Raises:
        ValueError: neither has.
    """
    names = os.listdir(folder)
    if any("zero_ext_0" in name for name in names):
        return False
    if not {"model.safetensors", "pytorch_model.bin", "optimizer.bin"} & {*names}:
        raise ValueError(
            f"zero_ext: '{folder}' holds neither 'zero_ext_0' of this Accelerator nor "
            "'model.safetensors', 'pytorch_model.bin' or 'optimizer.bin' of accelerate's own. Pass "
            "a folder that one of them has saved, without FSDP and DeepSpeed."
        )
    return True


def read_weights(folder: str | os.PathLike, number: int, model: nn.Module) -> dict[str, Any]:
    """The state dict of the ``number``-th model of accelerate's ``save_state()``, by ``model``'s
    names.

    Raises:
        ValueError: there is none.
    """
    ending = f"_{number}" if number else ""
    path = Path(folder) / f"model{ending}.safetensors"
    if path.is_file():
        state = safetensors.torch.load_file(path)
    elif (state := read(Path(folder) / f"pytorch_model{ending}.bin")) is None:
        raise ValueError(_missing(folder, f"model {number}", path))
    names = model.state_dict().keys()
    for prefix in ("_orig_mod.", "module.", "_orig_mod."):  # of torch.compile, of DDP
        if not names & state.keys():
            consume_prefix_in_state_dict_if_present(state, prefix)
    # Tied tensors are saved once.
    named = (model.named_parameters, model.named_buffers)
    tensors = dict(chain.from_iterable(each(remove_duplicate=False) for each in named))
    saved = {id(tensor): state[name] for name, tensor in tensors.items() if name in state}
    for name, tensor in tensors.items():
        if name in names and name not in state and id(tensor) in saved:
            state[name] = saved[id(tensor)]
    return state


def read_optimizer(folder: str | os.PathLike, number: int) -> dict[str, Any]:
    """The state of the ``number``-th optimizer of accelerate's ``save_state()``.

    Raises:
        ValueError: there is none.
    """
    path = Path(folder) / (f"optimizer_{number}.bin" if number else "optimizer.bin")
    if (state := read(path)) is None:
        raise ValueError(_missing(folder, f"optimizer {number}", path))
    return state


def _missing(folder: str | os.PathLike, what: str, path: Path) -> str:
    return (
        f"zero_ext: '{folder}' of accelerate has no '{path.name}' for {what}, counted from 0. "
        "Prepare the models and optimizers that were prepared when it was saved, in their order."
    )
