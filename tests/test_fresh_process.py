"""The forked processes of the tests are as fresh as they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from tests.fresh_process import run_python, start_python

PLACE = """
import json, os, sys
print(json.dumps({
    "arguments": sys.argv, "path": sys.path, "folder": os.getcwd(), "environment": dict(os.environ), "name": __name__,
    "input": sys.stdin.read(),
}))
"""
STATE = """
import json, numpy, os, random, sys, torch
print(json.dumps({
    "modules": sorted(sys.modules), "threads": [torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
    "random": [random.random(), numpy.random.rand(), torch.rand(1).item()],
}))
"""


def test_a_process_has_the_place_of_a_new_one(tmp_path):
    (tmp_path / "place.py").write_text(PLACE)
    environment = {"PYTHONPATH": "/somewhere", "A": "b"}
    for arguments in (["-c", PLACE, "x"], ["-m", "place", "x"], [str(tmp_path / "place.py"), "x"]):
        forked = run_python(arguments, cwd=tmp_path, env=environment)
        new = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        found, expected = json.loads(forked.stdout), json.loads(new.stdout)
        assert {key: found["environment"][key] for key in environment} == environment
        for told in (found, expected):  # the interpreter itself may add a locale
            told["environment"].pop("LC_CTYPE", None)
        assert found == expected


def test_a_process_has_the_libraries_and_nothing_of_the_package_nor_of_another():
    first, second = (json.loads(run_python(["-c", STATE]).stdout) for _ in range(2))
    assert {"torch", "transformers", "peft"} <= set(first["modules"])
    assert not [name for name in first["modules"] if name.split(".")[0] in ("snnk_peft", "tests", "pytest", "_pytest")]
    assert first["threads"] == [1, 1]
    assert not set(first["random"]) & set(second["random"])


def test_errors_and_signals_end_a_process():
    done = run_python(["-c", "import sys; print('before'); sys.exit(3)"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "before\n", "")
    done = run_python(["-c", "1 / 0"])
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    process = start_python(["-c", "import time; print('ready', flush=True); time.sleep(60)"])
    assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == process.poll() == -signal.SIGTERM
    assert process.communicate() == ("", None)
    assert not os.path.isdir(f"/proc/{process.pid}")
