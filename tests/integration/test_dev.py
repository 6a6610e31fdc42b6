"""`perdure dev` as a person uses it: real database, gateways, sidecars and an agent that needs no SDK."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from perdure_operator.local.state import StateDir

AGENT = """
import http.client, json, os, sys, time

def call(method, path, body=None):
    for _ in range(400):
        connection = http.client.HTTPConnection("127.0.0.1", int(os.environ["PERDURE_PORT"]), timeout=60)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        except ConnectionRefusedError:
            time.sleep(0.02)

status = 204
while status == 204:
    status, run = call("GET", "/v1/run?timeout=20")
if status == 410:
    sys.exit(0)
done = {entry["key"] for entry in run.get("journal", [])}
plan = run["input"]
print("attempt under epoch", run["epoch"], "after", len(done), "operations", flush=True)
for n in range(plan["steps"]):
    if f"/step:work#{n}" not in done:
        if not os.path.exists("hurry"):
            time.sleep(plan.get("seconds", 0))
        call("POST", "/v1/steps/end", {"key": f"/step:work#{n}", "name": f"work-{n}", "output": n})
if plan.get("signal"):
    wait = {"key": "/wait:go#0", "on": [{"kind": "signal", "name": plan["signal"]}], "suspend": True}
    if call("POST", "/v1/waits", wait)[1]["status"] == "suspended":
        sys.exit(0)
call("POST", "/v1/finish", {"outcome": plan.get("outcome", "succeeded"), "output": plan["steps"]})
"""
SDK_AGENT = """
import os, time
from perdure import Run, agent, step

@step
async def work(n: int, seconds: float) -> int:
    if not os.path.exists("hurry"):
        time.sleep(seconds)
    return n

@agent
async def main(run: Run, plan: dict[str, float]) -> None:
    for n in range(int(plan["steps"])):
        await work(n, plan["seconds"])

if __name__ == "__main__":
    main.serve()
"""
POOL = """
apiVersion: perdure.dev/v1alpha1
kind: AgentPool
metadata: { name: worker }
spec:
  template: { spec: { containers: [ { name: agent, image: example/agent:1, command: [python, agent.py] } ] } }
"""
RUN = """---
apiVersion: perdure.dev/v1alpha1
kind: AgentRun
metadata: { name: %s }
spec: { agent: { poolRef: { name: worker } }, input: %s, retry: { maxRetries: %d } }
"""


class Machine:
    """A folder with an agent, and `perdure` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, StateDir(folder / ".perdure")
        self.sessions: list[subprocess.Popen[str]] = []
        (folder / "agent.py").write_text(AGENT)

    def manifest(self, max_retries: int = 3, **runs: str) -> None:
        (self.folder / "runs.yaml").write_text(POOL + "".join(RUN % (*item, max_retries) for item in runs.items()))

    def perdure(self, *words: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(words), cwd=self.folder, env=self._env(), capture_output=True, text=True, timeout=timeout, check=False
        )

    def dev(self, *words: str) -> subprocess.Popen[str]:
        with (self.folder / "dev.out").open("a") as out:
            self.sessions.append(
                subprocess.Popen(self._command(("dev", *words)), cwd=self.folder, env=self._env(), stdout=out, stderr=out, text=True)
            )
        return self.sessions[-1]

    def until(self, run: str, *states: str, steps: int = 0) -> dict[str, object]:
        """Waits for the run to be in one of the states, with so many steps."""
        deadline = time.monotonic() + 60
        while True:
            found = self.perdure("get", run, "-o", "json")
            view = json.loads(found.stdout) if found.returncode == 0 else {}
            if view.get("state") in states and view["steps"] >= steps:
                return dict(view)
            assert time.monotonic() < deadline, f"{view}\n{found.stderr}\n{(self.folder / 'dev.out').read_text()}"
            time.sleep(0.1)

    def processes(self) -> list[int]:
        """Every process of the session but itself."""
        session = self.state.session()
        assert session is not None
        return [child.pid for child in psutil.Process(session.pid).children(recursive=True)]

    def _command(self, words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "perdure_operator.cli.main", *words]

    def _env(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}


@pytest.fixture
def machine(server_folder: Path) -> Iterator[Machine]:
    # Not pytest's own folder: the database's system user must be able to enter it when the tests run as root.
    folder = server_folder / f"dev-{time.monotonic_ns()}"
    folder.mkdir()
    found = Machine(folder)
    yield found
    for session in found.sessions:
        session.send_signal(signal.SIGTERM)
        session.wait(30)


def ended(pids: list[int]) -> None:
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(left, timeout=20)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
def test_once_runs_everything_and_fails_when_one_failed(machine: Machine) -> None:
    machine.manifest(good="{ steps: 2 }")
    first = machine.perdure("dev", "-f", "runs.yaml", "--once")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "default/good leased by worker-1 (epoch 1)" in first.stdout
    assert "default/good succeeded" in first.stdout
    assert "without finishing" not in first.stdout
    assert machine.state.session() is None

    machine.manifest(good="{ steps: 2 }", bad="{ steps: 1, outcome: failed }")
    second = machine.perdure("dev", "-f", "runs.yaml", "--once")
    assert second.returncode == 1, second.stdout + second.stderr
    assert "default/good is there from an earlier start: Succeeded" in second.stdout
    assert "default/bad failed" in second.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_after_every_kind_of_death_the_run_goes_on(machine: Machine) -> None:
    machine.manifest(long="{ steps: 1000, seconds: 0.2 }", waiting="{ steps: 1, signal: go }")
    machine.dev("-f", "runs.yaml")
    machine.until("long", "Running", steps=2)
    for victim in (("long",), ("gateway-1",), ("long", "--only", "agent"), ("postgres",)):
        killed = machine.perdure("kill", *victim)
        assert killed.returncode == 0, killed.stderr
        steps = machine.until("long", "Running", "Pending")["steps"]
        assert isinstance(steps, int)
        machine.until("long", "Running", steps=steps + 2)

    processes = machine.processes()
    machine.sessions[0].kill()
    machine.sessions[0].wait()
    ended(processes)
    assert machine.perdure("get").returncode == 5

    again = machine.dev("-f", "runs.yaml")
    (machine.folder / "hurry").touch()
    machine.until("long", "Succeeded", steps=1000)
    machine.until("waiting", "Suspended", steps=1)
    assert machine.perdure("signal", "waiting", "go").returncode == 0
    machine.until("waiting", "Succeeded")
    assert machine.perdure("verify").stdout == "all invariants hold\n"
    logs = [line for line in machine.perdure("logs", "waiting").stdout.splitlines() if not line.startswith("---")]
    assert [line.rpartition("after ")[2] for line in logs] == ["0 operations", "2 operations"]

    processes = machine.processes()
    again.send_signal(signal.SIGINT)
    assert again.wait(30) == 0
    ended(processes)


@pytest.mark.slow
def test_what_outlived_its_session_has_ended_before_its_run_goes_on(machine: Machine) -> None:
    machine.manifest(long="{ steps: 1000, seconds: 0.2 }")
    session = machine.dev("-f", "runs.yaml")
    machine.until("long", "Running", steps=2)
    processes = machine.processes()
    [guardian] = [pid for pid in processes if any("guardian" in word for word in psutil.Process(pid).cmdline())]
    agents = [pod.agent_pid for pod in machine.state.pods().values()]
    session.send_signal(signal.SIGSTOP)
    os.kill(guardian, signal.SIGKILL)
    session.kill()
    session.wait()
    assert all(psutil.pid_exists(pid) for pid in agents)

    again = machine.dev("-f", "runs.yaml")
    (machine.folder / "hurry").touch()
    machine.until("long", "Succeeded", steps=1000)
    ended(processes)
    said = (machine.folder / "dev.out").read_text()
    assert said.index("had left behind") < said.rindex("default/long leased by")
    assert machine.perdure("verify").stdout == "all invariants hold\n"
    again.send_signal(signal.SIGINT)
    assert again.wait(30) == 0


@pytest.mark.slow
@pytest.mark.parametrize("source", [AGENT, SDK_AGENT], ids=["http", "sdk"])
def test_ctrl_c_is_nobodys_failure(machine: Machine, source: str) -> None:
    (machine.folder / "agent.py").write_text(source)
    machine.manifest(max_retries=0, long="{ steps: 200, seconds: 0.2 }")
    session = machine.dev("-f", "runs.yaml")
    machine.until("long", "Running", steps=2)
    session.send_signal(signal.SIGINT)
    assert session.wait(30) == 0
    (machine.folder / "hurry").touch()
    machine.dev("-f", "runs.yaml")
    machine.until("long", "Succeeded", steps=200)
    given_back = r"(lost its worker \(Stopped\)|its worker was told to end, which is no failure); queued again"
    events = machine.perdure("events", "long").stdout
    assert re.search(given_back, events), [line for line in events.splitlines() if "step.succeeded" not in line]


@pytest.mark.slow
def test_a_pool_that_breaks_is_explained(machine: Machine) -> None:
    (machine.folder / "agent.py").write_text("import a_module_that_is_missing\n")
    machine.manifest(stuck="{ steps: 1 }")
    machine.dev("-f", "runs.yaml")
    deadline = time.monotonic() + 60
    while "No module named 'a_module_that_is_missing'" not in (text := (machine.folder / "dev.out").read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
    assert "next try in 1 s" in text
    why = machine.perdure("why", "stuck").stdout
    assert "PoolNotReady: queued, but pods of pool default/worker fail: worker-" in why
    assert "agent exited with code 1 after " in why
    assert "ModuleNotFoundError: No module named 'a_module_that_is_missing'" in why
    assert "no worker has had stuck yet" in machine.perdure("logs", "stuck").stderr
    second = machine.perdure("dev", "-f", "runs.yaml")
    assert second.returncode == 1
    assert "is running on" in second.stderr
