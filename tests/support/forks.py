"""A process that has imported torch and zero_ext, and forks the programs of launching.py.

The import takes longer than most of what the tests' programs do.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

# Only such modules as start no threads.
IMPORTS = ("numpy", "torch", "torch.distributed.tensor", "zero_ext")


class Program:
    """A running program."""

    def __init__(self, link: socket.socket):
        self._link = link
        self.pid = int(link.recv(32))
        self._code: int | None = None

    def fileno(self) -> int:
        """Readable when the program has ended."""
        return self._link.fileno()

    def wait(self) -> int:
        """Its exit code, or a negative signal number, as of ``subprocess.Popen``."""
        if self._code is None:
            answer = self._link.recv(32)
            self._link.close()  # from here on its pid may be that of another process
            assert answer, "the process that forks has ended"
            self._code = int(answer)
        return self._code

    def has_ended(self) -> bool:
        return self._code is not None or bool(select.select([self._link], [], [], 0)[0])

    def send_signal(self, number: int) -> None:
        """Nothing happens to one that has ended."""
        if self._code is None:
            os.kill(self.pid, number)


class Forks:
    """Starts programs. Ends with this process."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = "import forks; exec(forks.serve())"  # the programs run in the module __main__
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, str(theirs.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def close(self) -> None:
        self._ours.close()
        self._process.wait()

    def start(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], out: int, err: int
    ) -> Program:
        """``python *arguments``, whose output goes to two file descriptors."""
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([list(arguments), str(cwd), dict(env)]).encode()
        with theirs, self._lock:
            size = array.array("Q", [len(request)]).tobytes()
            socket.send_fds(self._ours, [size], [theirs.fileno(), out, err])
            for begin in range(0, len(request), 1 << 16):
                self._ours.send(request[begin : begin + (1 << 16)])
        return Program(link)


def serve() -> str:
    """Returns in each program, with what it is to execute."""
    requests = socket.socket(fileno=int(sys.argv.pop()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for the tests
    for name in IMPORTS:
        importlib.import_module(name)
    import zero_ext

    for name in zero_ext.__all__:
        getattr(zero_ext, name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has no other threads"
    while True:
        size, descriptors, _, _ = socket.recv_fds(requests, 8, 3)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        if not size:
            os._exit(0)
        request = b""
        while len(request) < array.array("Q", size)[0]:
            request += requests.recv(1 << 16)
        if os.fork() == 0:
            requests.close()
            return _begin(*json.loads(request), *descriptors)
        for each in descriptors:
            os.close(each)


def _begin(
    arguments: list[str], cwd: str, env: dict[str, str], link: int, out: int, err: int
) -> str:
    """In a process that waits for the program, and in the program, in which it returns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    child = os.fork()
    if child != 0:
        os.write(link, str(child).encode())
        # What writes to pipes must end with the program.
        os.closerange(0, link)
        os.closerange(link + 1, max(link, out, err) + 1)
        # The child stays a zombie, which can be sent signals, until the link is closed.
        end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert end is not None
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        os.write(link, str(code).encode())
        os.read(link, 1)
        os.waitpid(child, 0)
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for each in (link, out, err):
        os.close(each)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path = [path for path in sys.path if path not in ("", str(Path(__file__).parent))]
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, cwd)
        return f"import runpy; runpy._run_module_as_main({arguments[1]!r})"
    sys.argv = arguments
    sys.path.insert(0, str(Path(cwd, arguments[0]).parent))
    return (
        f"__file__ = {arguments[0]!r}\n"
        "exec(compile(open(__file__).read(), __file__, 'exec'), globals())"
    )
