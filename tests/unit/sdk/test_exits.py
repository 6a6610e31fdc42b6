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


HANGS = {
    "a thread": "threading.Thread(target=time.sleep, args=(60,)).start()",
    "a thread of an executor": "import concurrent.futures as f; f.ThreadPoolExecutor().submit(time.sleep, 60)",
    "a child": "import multiprocessing as m; m.get_context('fork').Process(target=time.sleep, args=(60,)).start()",
    "an exit handler": "atexit.register(time.sleep, 60)",
}


@pytest.mark.parametrize("first", ["true", ""], ids=["first of its container", "another process"])
@pytest.mark.parametrize("what", list(HANGS))
@pytest.mark.parametrize("told", [[], ["told"]], ids=["told then", "told before"])
def test_an_interpreter_that_cannot_end_is_ended_by_sigterm(what: str, told: list[str], first: str) -> None:
    code = AGENT.replace("try:\n", f"{HANGS[what]}\nprint('hangs', flush=True)\ntry:\n", 1).replace("os.kill =", "nothing =")
    env = {**os.environ, "PERDURE_AWAIT_SIGTERM": first}
    if not first:
        code = code.replace("os.getpid = lambda: 1", "")
    with subprocess.Popen([sys.executable, "-c", code, "end", *told], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        while "finally" not in process.stdout.readline():
            pass
        if not told:
            time.sleep(QUIET_SECONDS)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(10) == 7
        finally:
            process.kill()


def test_what_the_program_has_to_do_is_waited_for() -> None:
    code = AGENT.replace('print("finally", flush=True)', 'print("began", flush=True); time.sleep(3); print("finally", flush=True)')
    with subprocess.Popen([sys.executable, "-c", code, "end"], stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        while "began" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=20)
        assert process.returncode == 7
    assert "finally" in said
    assert "exit handlers" in said


@pytest.mark.parametrize("how", ["leave", "end"])
@pytest.mark.parametrize(
    ("arguments", "env"), [(["told"], {}), ([], {"PERDURE_AWAIT_SIGTERM": ""})], ids=["SIGTERM has come", "no kubelet"]
)
def test_otherwise_it_ends_at_once(how: str, arguments: list[str], env: dict[str, str]) -> None:
    with ending(how, *arguments, **env) as process:
        said, _ = process.communicate(timeout=5)
        assert process.returncode == 7
        assert ("exit handlers" in said) == (how == "end")
