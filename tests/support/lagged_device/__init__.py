"""A device for tests on machines without a GPU: ``torch.device("lagged", 0)`` and 1.

Its memory is the host's, but its work is queued on streams that lag behind: see Note [What a
missing wait looks like here] in runtime.h and Note [How an operator runs] in ops.cpp. Like CUDA it
refuses tensors and generators of other devices, its random numbers are its own, and so are the last
bits of matrix products. ::

    import lagged_device

    lagged_device.load()  # before the process' first backward

The first call compiles the device into build/tests/lagged_device/TORCH, in about a minute.

``load()`` also registers "lccl", which is to this device what NCCL is to CUDA, see lccl.h:
``dist.init_process_group("lccl")`` or ``("cpu:gloo,lagged:lccl")``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import compiling
import torch
import torch.distributed as dist

from zero_ext import _C

HERE = Path(__file__).resolve().parent
FOLDER = f"lagged_device/{torch.__version__}"
BUILD = compiling.BUILD / FOLDER
LIBRARY = BUILD / "liblagged_device.so"
MODULE = BUILD / "_lccl.so"


def load() -> ModuleType:
    """Build the device if its sources have changed, register it, and return ``torch.lagged``.

    Raises:
        RuntimeError: the process has run a backward already. Autograd starts the threads of all
            devices with the first one.
    """
    if hasattr(torch, "lagged"):
        return torch.lagged
    build()
    _library().lagged_register()
    torch.utils.rename_privateuse1_backend("lagged")
    torch._register_device_module("lagged", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _check_autograd()
    dist.Backend.register_backend("lccl", make_lccl, devices=["lagged"])
    # What is queued must not run while the process takes itself apart.
    atexit.register(_library().lagged_finish)
    return torch.lagged


def kernels_address() -> int:
    """The address of the device's ``zero_ext::kernels::Kernels`` (csrc/kernels/kernels.h)."""
    return _library().lagged_kernels(ctypes.c_void_p(_C.kernels_on(torch.device("cpu"))))


def share_memory() -> None:
    """Ranks' devices read each other's memory from now on, where torch asks for such memory."""
    _library().lagged_share_memory()


def set_lag(lag_us: int) -> None:
    """How long work that nobody waits for is held back; 50,000 at first. 0: streams run freely."""
    _library().lagged_set_lag_us(lag_us)


@contextlib.contextmanager
def one_connection() -> Iterator[None]:
    """As by ``CUDA_DEVICE_MAX_CONNECTIONS=1``: work waits for all that was queued before it, on
    whatever stream."""
    _library().lagged_set_one_connection(True)
    try:
        yield
    finally:
        _library().lagged_set_one_connection(False)


def set_own_sums(own: bool) -> None:
    """Whether matrix products have other last bits than the CPU's, as at first: Note [Own sums]."""
    _library().lagged_set_own_sums(own)


def fail_after(count: int) -> None:
    """One allocation, of a device or of pinned memory, raises after ``count`` more that succeed.

    A negative count takes that back.
    """
    _library().lagged_fail_after(count)


def end_with_errors() -> None:
    """From now on a task that fails ends the process, as NCCL's watchdog does."""
    _library().lagged_end_with_errors()


def faults() -> list[str]:
    """Waits for all streams, and tells what was written after a release or behind an end."""
    return _library().lagged_faults().decode().splitlines()


def late_connections() -> list[str]:
    """The first call of each kind, of each of lccl's groups, that was made inside a backward: NCCL
    connects there."""
    return _library().lagged_late_connections().decode().splitlines()


def aborts() -> int:
    """How many of lccl's groups were aborted so far, in this process."""
    return _library().lagged_aborts()


def host_waits() -> int:
    """How often the host has waited for a device so far, in this process."""
    return _library().lagged_host_waits()


def kernel_calls() -> int:
    """How many kernels of zero_ext's table were launched so far, in this process."""
    return _library().lagged_kernel_calls()


def event_queries() -> int:
    """How often somebody asked for an event, or waited for one, so far, in this process."""
    return _library().lagged_event_queries()


@contextlib.contextmanager
def capture() -> Iterator[list[str]]:
    """Lists what the capture of the current stream's work would have been refused for.

    As ``torch.cuda.graph()``, it waits for the device before. What is captured runs, and is over
    at the end.
    """
    torch.accelerator.synchronize()
    stream = torch.lagged.current_stream()
    _library().lagged_begin_capture(stream.device_index, stream.stream_id)
    refused: list[str] = []
    try:
        yield refused
    finally:
        refused += _library().lagged_end_capture().decode().splitlines()
        torch.accelerator.synchronize()


def stream_handle(stream: torch.Stream) -> int:
    """What ``c10::Stream::native_handle()`` is for ``stream``."""
    return _library().lagged_stream_handle(stream.device_index, stream.stream_id)


def make_lccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    """The backend "lccl" of one group. Returns when all its ranks have come.

    Raises:
        RuntimeError: a rank has not come within ``timeout``.
    """
    wire = dist.ProcessGroupGloo(dist.PrefixStore("lccl", store), rank, size, timeout)
    return _module().make(wire, timeout)


def build() -> None:
    """Compiles what has changed."""
    torch_folder = Path(torch.__file__).parent
    folders = [f"-I{compiling.CSRC}", f"-I{HERE}", f"-isystem{torch_folder / 'include'}"]
    flags = [*compiling.FLAGS, "-O1", "-Wall", "-DUSE_DISTRIBUTED", *folders]
    own_headers = sorted(HERE.glob("*.h"))

    def compiled(name: str, *more: str, inputs: Sequence[Path] = ()) -> compiling.Product:
        source = HERE / f"{name}.cpp"
        return compiling.compiled(FOLDER, source, [*flags, *more], [*own_headers, *inputs])

    objects = [
        compiled("torch_parts", inputs=sorted(HERE.glob("*.cpp"))),
        compiled("kernels", inputs=compiling.kernel_headers()),
        compiled("capture"),
        compiled("runtime"),
    ]
    # All but this one needs no Python.
    module = compiled("lccl_module", f"-isystem{sysconfig.get_path('include')}")
    compiling.make([*objects, module])
    path = torch_folder / "lib"
    shared = ["-shared", f"-L{path}", f"-Wl,-rpath,{path}"]
    libraries = "-ltorch -ltorch_cpu -lc10 -lpthread".split()
    compiling.make([compiling.linked(LIBRARY, objects, [*shared, *libraries])])
    shared += [f"-L{BUILD}", "-Wl,-rpath,$ORIGIN"]
    libraries = "-llagged_device -ltorch_python -ltorch_cpu -lc10".split()
    compiling.make([compiling.linked(MODULE, [module], [*shared, *libraries])])


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.lagged_kernels.restype = ctypes.c_void_p
    library.lagged_stream_handle.restype = ctypes.c_void_p
    library.lagged_stream_handle.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.lagged_faults.restype = ctypes.c_char_p
    library.lagged_late_connections.restype = ctypes.c_char_p
    library.lagged_aborts.restype = ctypes.c_int64
    library.lagged_host_waits.restype = ctypes.c_int64
    library.lagged_kernel_calls.restype = ctypes.c_int64
    library.lagged_begin_capture.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.lagged_end_capture.restype = ctypes.c_char_p
    library.lagged_event_queries.restype = ctypes.c_int64
    library.lagged_set_own_sums.argtypes = [ctypes.c_bool]
    library.lagged_set_lag_us.argtypes = [ctypes.c_int64]
    library.lagged_set_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
    library.lagged_seed.restype = ctypes.c_uint64
    library.lagged_fail_after.argtypes = [ctypes.c_int64]
    for name in ["allocated_bytes", "peak_bytes", "allocations"]:
        getattr(library, f"lagged_{name}").restype = ctypes.c_int64
    return library


@functools.cache
def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_lccl", MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_autograd() -> None:
    try:
        # On each, whose thread has begun then: one that begins at the end of the process ends it.
        for index in range(torch.accelerator.device_count()):
            one = torch.ones(1, device=f"lagged:{index}", requires_grad=True)
            (one * 2).sum().backward()
    except RuntimeError as error:
        raise RuntimeError(
            "the device lagged came after this process' first backward, which started autograd's "
            "threads for the devices of that time. Call lagged_device.load() earlier"
        ) from error


def _index(device=None) -> int:
    """The index of a device, or of the current one."""
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _Device:
    """``with torch.lagged.device(1):``"""

    def __init__(self, device):
        self.index = _index(device)

    def __enter__(self):
        self.before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_):
        torch.accelerator.set_device_index(self.before)


class _Stream(torch.Stream):
    """A new stream of the current device, or of a given one."""

    def __new__(cls, device=None, **arguments):
        return super().__new__(cls, device=torch.device("lagged", _index(device)), **arguments)


class _Event(torch.Event):
    def __new__(cls, enable_timing=False, blocking=False):
        return super().__new__(cls, device="lagged", enable_timing=enable_timing, blocking=blocking)


@contextlib.contextmanager
def _current_stream(stream: torch.Stream | None):
    """Makes ``stream`` the current one of its device, and that the current device."""
    if stream is None:
        yield
        return
    with stream:
        yield


def _device_module() -> ModuleType:
    """``torch.lagged``: what PyTorch asks of a device's module, and how memory is counted."""
    module = ModuleType("torch.lagged")
    accelerator = torch.accelerator
    library = _library()

    def get_rng_state(device="lagged"):
        state = torch.empty_like(torch.default_generator.get_state(), device="cpu")
        library.lagged_get_rng_state(_index(device), ctypes.c_void_p(state.data_ptr()))
        return state

    def set_rng_state(state, device="lagged"):
        library.lagged_set_rng_state(_index(device), ctypes.c_void_p(state.data_ptr()))

    def manual_seed(seed):
        library.lagged_set_seed(_index(), seed)

    def manual_seed_all(seed):
        for index in range(library.lagged_device_count()):
            library.lagged_set_seed(index, seed)

    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: library.lagged_device_count(),
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "synchronize": lambda device=None: accelerator.synchronize(_index(device)),
        "current_stream": lambda device=None: accelerator.current_stream(_index(device)),
        "set_stream": accelerator.set_stream,
        "stream": _current_stream,
        "Stream": _Stream,
        "Event": _Event,
        "device": _Device,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: library.lagged_seed(_index()),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: library.lagged_allocated_bytes(_index(device)),
        "max_memory_allocated": lambda device=None: library.lagged_peak_bytes(_index(device)),
        "reset_peak_memory_stats": lambda device=None: library.lagged_reset_peak(_index(device)),
        "allocations": lambda device=None: library.lagged_allocations(_index(device)),
        "pinned_memory_allocated": lambda: library.lagged_allocated_bytes(-1),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
