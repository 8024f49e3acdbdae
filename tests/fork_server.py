"""A process that has torch, transformers and peft loaded, but not snnk_peft, and forks itself for each request.

Started by `fresh_process.py`, with one end of a socket pair. A request is one byte with five open files: the job as
JSON, standard input, output and error, and a channel on which the process id and then the exit code are reported.
Between the server and the process it asked for stands a third, which does nothing but wait.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# What the children would import anyway, and what costs most of their time.
PRELOADED = (
    "torch",
    "transformers.modeling_utils",
    "transformers.pipelines",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.modernbert.modeling_modernbert",
    "peft",
)
# What only the recipes import; not everybody has it. (Not datasets and sklearn: their pyarrow starts a thread.)
OPTIONAL = ("matplotlib.figure", "rich.progress", "yaml")


def preload() -> None:
    """Import everything, without starting a thread: a fork copies only the thread that forks."""
    for name in PRELOADED:
        importlib.import_module(name)
    for name in OPTIONAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not [name for name in sys.modules if name.split(".")[0] == "snnk_peft"]
    tasks = Path("/proc/self/task")
    assert not tasks.is_dir() or len(list(tasks.iterdir())) == 1, "a thread runs; its state would be lost in a fork"
    gc.freeze()  # a collection in a child would copy every page


def serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request. Returns the job, in the forked process; None, in this one, when nobody asks any more."""
    while True:
        byte, files, _, _ = socket.recv_fds(requests, 1, 5)
        reap(block=not byte)
        if not byte:
            return None
        if os.fork() == 0:
            requests.close()
            job, *streams, channel = files
            process = os.fork()
            if process == 0:
                os.close(channel)
                with os.fdopen(job) as file:
                    file.seek(0)
                    return json.load(file), streams
            for stream in streams:
                os.close(stream)
            os.write(channel, f"{process}\n".encode())
            status = os.waitpid(process, 0)[1]
            with contextlib.suppress(BrokenPipeError):
                os.write(channel, f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os._exit(0)
        for file in files:
            os.close(file)


def reap(block: bool) -> None:
    """Let waiting processes that have ended go; their times count as this one's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if block else os.WNOHANG)[0]:
            pass


def become(job: dict[str, Any], streams: list[int]) -> None:
    """Take the streams, folder, environment, arguments and random state that a new process would have."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(job["cwd"])
    inherited = [str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ.clear()
    os.environ.update(job["env"])
    given = [entry for entry in job["env"].get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*given, *(entry for entry in sys.path[1:] if entry not in inherited)]
    importlib.invalidate_caches()
    random.seed()
    for name, seed in (("numpy", lambda numpy: numpy.random.seed()), ("torch", lambda torch: torch.seed())):
        if name in sys.modules:
            seed(sys.modules[name])


def execute(arguments: list[str]) -> None:
    """What `python *arguments` does: -c code, -m module, or a file."""
    kind, *rest = arguments
    main = ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    if kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).resolve().parent))
        main.__file__ = kind
        code = compile(Path(kind).read_bytes(), kind, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    preload()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        become(*request)
        execute(request[0]["arguments"])
