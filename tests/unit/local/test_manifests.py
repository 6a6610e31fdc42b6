"""Manifests from files: several documents, folders, and the line of every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure_operator.kube.api.v1alpha1 import AgentPool, AgentRun
from perdure_operator.local.manifests import ManifestError, load, pools, runs, warnings

POOL = """\
apiVersion: perdure.dev/v1alpha1
kind: AgentPool
metadata: { name: worker }
spec:
  template:
    spec:
      containers: [{ name: agent, image: i, command: [agent] }]
"""
RUN = """\
apiVersion: perdure.dev/v1alpha1
kind: AgentRun
metadata:
  name: weekly
spec:
  agent: { poolRef: { name: worker } }
"""


def mistakes(*paths: Path) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        load(paths)
    return str(caught.value).splitlines()


def write(folder: Path, text: str, name: str = "m.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_several_documents_of_a_file(tmp_path: Path) -> None:
    found = load([write(tmp_path, f"# a comment\n---\n{POOL}---\n{RUN}---\n")])
    assert [type(item.manifest) for item in found] == [AgentPool, AgentRun]
    assert [(item.full_name, item.line) for item in found] == [("default/worker", 3), ("default/weekly", 11)]
    assert [i.name for i, _ in pools(found)] == ["worker"]
    assert [i.name for i, _ in runs(found)] == ["weekly"]


def test_a_folder_is_read_in_order_and_json_is_yaml(tmp_path: Path) -> None:
    write(tmp_path, RUN, "b.yml")
    write(tmp_path, '{"apiVersion": "perdure.dev/v1alpha1", "kind": "AgentRun", "metadata": {"name": "j"}, '
          '"spec": {"agent": {"poolRef": {"name": "worker"}}}}', "a.json")  # fmt: skip
    write(tmp_path, "not a manifest", "readme.txt")
    assert [item.name for item in load([tmp_path])] == ["j", "weekly"]


def test_the_namespace_is_the_manifests_or_the_given_one(tmp_path: Path) -> None:
    own = write(tmp_path, RUN.replace("  name: weekly", "  name: weekly\n  namespace: report"), "own.yaml")
    found = load([own, write(tmp_path, RUN)], namespace="team")
    assert [item.full_name for item in found] == ["report/weekly", "team/weekly"]


def test_dates_and_times_of_day_stay_text(tmp_path: Path) -> None:
    text = RUN + "  input: { day: 2026-11-21, at: 12:30, octal: 0o17, hex: 0x10, half: .5, exp: 1e3, none: null, n: -7, v: 1.10.2 }\n"
    ((_, run),) = runs(load([write(tmp_path, text)]))
    assert run.spec.input == {
        "day": "2026-11-21", "at": "12:30", "octal": 15, "hex": 16, "half": 0.5, "exp": 1000.0, "none": None, "n": -7, "v": "1.10.2"
    }  # fmt: skip


def test_every_mistake_has_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, f"{RUN}  retry:\n    maxRetrys: 3\n  priority: high\n---\n{POOL}  capacity: {{ minIdle: 9, maxIdle: 1 }}\n")
    assert mistakes(file) == [
        f"{file}:8: spec.retry.maxRetrys: unknown field; did you mean maxRetries?",
        f'{file}:9: spec.priority: must be a whole number, got "high"',
        f"{file}:18: spec.capacity: minIdle is larger than maxIdle (document 2)",
    ]


def test_a_missing_field_points_at_what_it_is_missing_from(tmp_path: Path) -> None:
    file = write(tmp_path, RUN.replace("agent: { poolRef: { name: worker } }", "summary: x"))
    assert mistakes(file) == [f"{file}:5: spec.agent: is required"]


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, RUN + "  summary: one\n  summary: two\n")
    assert mistakes(file) == [f"{file}:8: the key 'summary' stands twice in one mapping"]


def test_what_is_not_yaml_has_its_line_and_other_files_are_still_read(tmp_path: Path) -> None:
    broken = write(tmp_path, "a: [1,\nb: 2\n", "broken.yaml")
    missing = tmp_path / "missing.yaml"
    wrong = write(tmp_path, "kind: Pod\n", "pod.yaml")
    found = mistakes(broken, missing, wrong)
    assert found[0].startswith(f"{broken}:3: is not YAML")
    assert found[1] == f"{missing}: cannot be read: No such file or directory"
    assert found[2].startswith(f"{wrong}:1: apiVersion: must be")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no document"),
        ("- a\n", "must be a mapping"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
        ("a: &a [*a]\n", "must be"),
        ("[" * 5000, "is nested too deeply"),
        ("a: \x00\n", "is not YAML"),
    ],
)
def test_strange_files_are_refused_in_words(tmp_path: Path, text: str, message: str) -> None:
    assert message in mistakes(write(tmp_path, text))[0]


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    first, second = write(tmp_path, RUN, "a.yaml"), write(tmp_path, RUN, "b.yaml")
    assert mistakes(first, second) == [f"{second}:1: AgentRun default/weekly is defined already at {first}:1"]


def test_an_empty_folder_is_a_mistake(tmp_path: Path) -> None:
    assert "holds no file that ends in .yaml" in mistakes(tmp_path)[0]


def test_fields_that_are_not_in_force_yet_are_told(tmp_path: Path) -> None:
    limited = RUN + "  budgets: { maxSteps: 5, maxRetriesPerToolCall: 1 }\n  stopConditions: [done]\n"
    tools = POOL + "  tools: [{ name: mail, class: external }, { name: post, onDivergence: Agent }]\n"
    file = write(tmp_path, f"{limited}---\n{tools}---\n{RUN.replace('weekly', 'plain')}")
    assert list(warnings(load([file]))) == [
        f"{file}:1: warning: spec.budgets.maxSteps, spec.stopConditions: recorded, not in force yet",
        f"{file}:10: warning: spec.tools[].onDivergence: recorded, not in force yet",
    ]
