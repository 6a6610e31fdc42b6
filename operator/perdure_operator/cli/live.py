"""What `perdure dev` shows: a table of the runs and the last things that happened, or, without a terminal, a line for each."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import Protocol, Self

from rich.console import Group
from rich.live import Live
from rich.text import Text

from perdure_operator.cli import render
from perdure_operator.cli.follow import News
from perdure_operator.cli.story import PodNames, clock, plain, tell
from perdure_operator.cli.views import RunView

KEPT_LINES = 200
HELP = "In another terminal, same folder: perdure get · why RUN · logs RUN · signal RUN NAME · kill RUN. Ctrl-C stops; the state is kept."


class View(Protocol):
    """Where the session tells what goes on."""

    def say(self, text: str) -> None:
        """Something about the session itself. May be called from any thread."""
        ...

    def update(self, news: News, pod_names: PodNames) -> None: ...

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Lines:
    """One line an event, for logs and pipes."""

    def __init__(self, *, with_namespace: bool = True) -> None:
        self._full = with_namespace

    def say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def update(self, news: News, pod_names: PodNames) -> None:
        for run, event in news.events:
            print(f"{clock(event.at)} {plain(run.full_name)} {tell(event, pod_names(run.pool))}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


class Screen:
    """A table that stays in place above the story."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = render.console()
        self._story: deque[Text] = deque(maxlen=KEPT_LINES)
        self._news = News([])
        self._pod_names: PodNames = lambda _: str
        self._lock = threading.Lock()
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop", transient=False)

    def say(self, text: str) -> None:
        with self._lock:
            for number, line in enumerate(text.splitlines()):
                self._story.append(Text(plain(f"{time.strftime('%H:%M:%S')} {line}" if number == 0 else line, 500), style="dim"))
        self._draw()

    def update(self, news: News, pod_names: PodNames) -> None:
        with self._lock:
            self._news, self._pod_names = news, pod_names
            for run, event in news.events:
                parts = (f"{clock(event.at)} ", (plain(run.full_name), "bold"), f" {tell(event, pod_names(run.pool))}")
                self._story.append(Text.assemble(*parts))
        self._draw()

    def _draw(self) -> None:
        with self._lock:
            height = max(12, self._console.size.height)
            runs = _shown(self._news.runs, height // 2)
            parts: list[Text | object] = [Text(self._title, style="bold")]
            if runs:
                parts.append(render.runs(runs, self._pod_names, with_namespace=len({run.namespace for run in self._news.runs}) > 1))
                if hidden := len(self._news.runs) - len(runs):
                    parts.append(Text(f"and {hidden} more: perdure get -A", style="dim"))
            else:
                parts.append(Text("no runs yet: perdure submit FILE", style="dim"))
            room = max(1, height - len(runs) - 7)
            parts += [Text(), *list(self._story)[-room:], Text(), Text(HELP, style="dim")]
            for text in parts:
                if isinstance(text, Text):
                    text.no_wrap, text.overflow = True, "ellipsis"
            self._live.update(Group(*parts), refresh=True)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


def _shown(runs: list[RunView], room: int) -> list[RunView]:
    """What fits: active runs, then the ones that ended last."""
    active = [run for run in runs if not run.terminal]
    ended = sorted((run for run in runs if run.terminal), key=lambda run: run.finished_at or "", reverse=True)
    return (active + ended)[:room]


def view(title: str) -> View:
    """A screen if there is one."""
    return Screen(title) if sys.stdout.isatty() else Lines()
