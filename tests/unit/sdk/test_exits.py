"""How an agent's process ends where a kubelet ends it. The process of the test only believes to be the first of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

AGENT = """
import atexit, os, signal, sys, threading, time
from perdure.sdk import exits
os.getpid = lambda: 1
os.kill = lambda pid, number: print("kill", pid, int(number), flush=True)
leaving = exits.ProcessExits()
leaving.heed()
if "told" in sys.argv:
    signal.raise_signal(signal.SIGTERM)
def work():
    while True:
        os.write(1, b"still at work\\n")
        time.sleep(0.01)
threading.Thread(target=work, daemon=True).start()
atexit.register(print, "exit handlers", flush=True)
try:
    getattr(leaving, sys.argv[1])(7)
finally:
    print("finally", flush=True)
"""
QUIET_SECONDS = 0.3


@contextmanager
def ending(how: str, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    command, environment = [sys.executable, "-c", AGENT, how, *arguments], {**os.environ, "PERDURE_AWAIT_SIGTERM": "true", **env}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until_awaiting(process: subprocess.Popen[str]) -> None:
    """Until it is the other program."""
    deadline = time.monotonic() + 20
    while b"sigtimedwait" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="containers are Linux")
@pytest.mark.parametrize("how", ["leave", "end"])
@pytest.mark.parametrize("seconds", [0.0, QUIET_SECONDS])
def test_nothing_of_the_agent_is_left_while_the_kubelet_is_awaited(how: str, seconds: float) -> None:
    with ending(how) as process:
        until_awaiting(process)
        time.sleep(seconds)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=10)
        assert process.returncode == 7
    assert f"kill -1 {int(signal.SIGKILL)}" in said, "what it had started would outlive it"
    assert [word in said for word in ("finally", "exit handlers")] == [how == "end"] * 2
    assert said.count("still at work") < 20, "a thread went on"


def test_what_serves_in_a_thread_ends_that_thread() -> None:
    code = AGENT.replace(
        "getattr(leaving, sys.argv[1])(7)", "t = threading.Thread(target=leaving.end, args=(7,)); t.start(); t.join(); sys.exit(8)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=20,
        env={**os.environ, "PERDURE_AWAIT_SIGTERM": "true"},
        check=False,
    )
    assert done.returncode == 8
    assert "exit handlers" in done.stdout


@pytest.mark.parametrize("how", ["leave", "end"])
@pytest.mark.parametrize(
    ("arguments", "env"), [(["told"], {}), ([], {"PERDURE_AWAIT_SIGTERM": ""})], ids=["SIGTERM has come", "no kubelet"]
)
def test_otherwise_it_ends_at_once(how: str, arguments: list[str], env: dict[str, str]) -> None:
    with ending(how, *arguments, **env) as process:
        said, _ = process.communicate(timeout=5)
        assert process.returncode == 7
        assert ("exit handlers" in said) == (how == "end")
