"""docs/sdk.md is true: its blocks are one module, and the tests in it pass. So is the agent in the README."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from perdure.testing import Simulation

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "sdk.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TESTS = re.findall(r"^def (test_\w+)", GUIDE.read_text(), re.MULTILINE)


def module_of(file: Path) -> ModuleType:
    """The blocks, each on the lines where it stands."""
    text, code = file.read_text(), ""
    for block in _BLOCK.finditer(text):
        code += "\n" * (text.count("\n", 0, block.start(1)) - code.count("\n")) + block[1]
    module = ModuleType(f"perdure_{file.stem}")
    sys.modules[module.__name__] = module  # type hints are looked up there
    exec(compile(code, str(file), "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def guide() -> Iterator[ModuleType]:
    module = module_of(GUIDE)
    yield module
    del sys.modules[module.__name__]


def test_the_agent_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = module_of(ROOT / "README.md")
    sim = Simulation(module.letter, {"topic": "owls", "to": "you"}).signal("approved", {"by": "me"}, after=60).run()
    del sys.modules[module.__name__]
    assert sim.result == {"approved": {"by": "me"}}
    assert Path("outbox.txt").read_text().endswith(" to you: All about owls.\n")


@pytest.mark.parametrize("name", TESTS)
def test_what_the_guide_says(guide: ModuleType, name: str) -> None:
    test: Callable[[], None] = getattr(guide, name)
    test()


def test_every_section_with_code_has_a_test() -> None:
    sections = [section for section in GUIDE.read_text().split("\n## ")[1:] if "```python" in section]
    assert len(sections) >= 8
    assert all("def test_" in section for section in sections)
