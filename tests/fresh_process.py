"""Fresh Python processes for tests at the price of a fork: `run_python(["-c", code])`, `start_python([file, ...])`.

Importing torch and transformers takes five to seven seconds of processor time in every process. Here a server
(`fork_server.py`) imports them once per test worker and forks: the child has torch, transformers and peft loaded, its
own environment, folder, arguments and streams, and has never seen snnk_peft. So it can prove what a fresh process
proves about this package: that a file alone is enough, that seeds do not depend on the process, what happens without
the package (`sys.modules["snnk_peft"] = None`), what a signal does.

It cannot prove what depends on the imports of the other libraries or on variables they read while they are imported
(HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, OMP_NUM_THREADS): use `subprocess` for those, or a `ForkServer` with these
variables if there are several processes. A process has one thread, and an empty HF_HOME that it shares with the others.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SERVER = Path(__file__).with_name("fork_server.py")
ROOT = SERVER.parent.parent


class FreshProcess:
    """A forked process, with the part of the interface of `subprocess.Popen` that the tests use."""

    def __init__(self, arguments: Sequence[str], channel: socket.socket, stdout: IO[str] | None) -> None:
        self.args, self.stdout = arguments, stdout
        self.returncode: int | None = None
        self._channel = channel
        self.pid = self._number()

    def _number(self) -> int:
        line = b""  # byte by byte: what is read too early would be missed by `select`
        while not line.endswith(b"\n"):
            byte = self._channel.recv(1)
            assert byte, "the fork server has ended; what it said is on standard error"
            line += byte
        return int(line)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        if self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            self.returncode = self._number()
            self._channel.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as soon as there is one."""
        if self.returncode is None and not select.select([self._channel], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float = 300) -> tuple[str, None]:
        """The rest of the output, errors in it; a process that takes longer is killed, which its exit code tells."""
        assert self.stdout is not None
        watch = threading.Timer(timeout, self.kill)
        watch.start()
        rest = self.stdout.read()
        watch.cancel()
        self.wait(timeout)
        return rest, None

    def send_signal(self, number: int) -> None:
        """As `kill -number`; nothing if the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """One server and the processes it forks, in this environment changed by `env` (an empty string: removed)."""

    def __init__(self, **env: str) -> None:
        self.env = {key: value for key, value in {**os.environ, **env, "OMP_NUM_THREADS": "1"}.items() if value}
        ours, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, str(SERVER), str(theirs.fileno())],
                env=self.env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._requests = ours

    def close(self) -> None:
        """The server ends with the last process it started."""
        self._requests.close()
        self._server.wait()

    def _fork(
        self, arguments: Sequence[str], cwd: Path | None, env: Mapping[str, str] | None, *streams: int
    ) -> socket.socket:
        channel, theirs = socket.socketpair()
        env = self.env if env is None else env
        job = {"arguments": [str(a) for a in arguments], "cwd": str(cwd or Path.cwd()), "env": dict(env)}
        with theirs, tempfile.TemporaryFile("w+") as file, open(os.devnull) as nothing:
            json.dump(job, file)
            file.flush()
            socket.send_fds(self._requests, [b"."], [file.fileno(), nothing.fileno(), *streams, theirs.fileno()])
        return channel

    def start(
        self, arguments: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> FreshProcess:
        """As `Popen([sys.executable, *arguments], stdout=PIPE, stderr=STDOUT, text=True)`."""
        reading, writing = os.pipe()
        channel = self._fork(arguments, cwd, env, writing, writing)
        os.close(writing)
        return FreshProcess(arguments, channel, os.fdopen(reading))

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            channel = self._fork(arguments, cwd, env, out.fileno(), err.fileno())
            process = FreshProcess(arguments, channel, None)
            try:
                process.wait(timeout)
            finally:
                process.kill()
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(arguments, process.wait(), out.read(), err.read())


@functools.cache
def server() -> ForkServer:
    """The server of this test process, started by the first test that needs it."""
    return ForkServer(HF_HOME=tempfile.mkdtemp(prefix="snnk-fresh-"))


def close() -> None:
    """At the end of the tests: the server goes, so that its time is counted, and its folder."""
    if server.cache_info().currsize:
        server().close()
        shutil.rmtree(server().env["HF_HOME"])
        server.cache_clear()


def run_python(
    arguments: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` (-c code, -m module or a file) in a process that has not imported this package."""
    return server().run(arguments, cwd=cwd, env=env, timeout=timeout)


def run_processes(
    arguments: Sequence[str], *, env: Mapping[str, str], count: int = 2, timeout: float = 120
) -> list[tuple[int, str]]:
    """Exit code and output of each of `count` processes that form a process group, as torchrun would start them.

    What a launcher does when one of them dies is not in here.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        start_python(arguments, env={**env, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.wait(), output) for process, output in zip(started, outputs, strict=True)]


def start_python(
    arguments: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> FreshProcess:
    """Start `python *arguments`; output and errors go to its `stdout`."""
    return server().start(arguments, cwd=cwd, env=env)
