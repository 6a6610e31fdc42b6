"""The cache of watched objects against any order, loss and repetition of news."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.harness.fake_kube import FakeKube

from perdure_operator.kube.cache import BURIED_SECONDS, Cache
from perdure_operator.kube.client import CONFIGMAPS, Object, Resource

NAMES = ("a", "b", "c")
Change = tuple[Resource, str, str]


def thing(name: str, version: int, uid: str = "1", namespace: str = "default") -> Object:
    return {"metadata": {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version), "managedFields": ["many"]}}


class Bench:
    def __init__(self) -> None:
        self.changes: list[str] = []
        self.time = 0.0
        self.cache = Cache(lambda resource, namespace, name: self.changes.append(name), now=lambda: self.time)

    def version(self, name: str = "a") -> str | None:
        found = self.cache.get(CONFIGMAPS, "default", name)
        return found["metadata"]["resourceVersion"] if found else None


def test_late_news_are_ignored() -> None:
    bench = Bench()
    for version in (5, 4, 5, 6):
        bench.cache.seen(CONFIGMAPS, thing("a", version))
    assert bench.version() == "6"
    assert bench.changes == ["a", "a"]
    assert "managedFields" not in bench.cache.get(CONFIGMAPS, "default", "a")["metadata"]  # type: ignore[index]


def test_a_deleted_object_is_remembered_until_forgotten_and_does_not_come_back() -> None:
    bench = Bench()
    bench.cache.seen(CONFIGMAPS, thing("a", 1))
    bench.cache.gone(CONFIGMAPS, thing("a", 2))
    bench.cache.seen(CONFIGMAPS, thing("a", 1))
    bench.cache.replace(CONFIGMAPS, [thing("a", 1)], "1")
    assert bench.version() is None
    assert bench.cache.deleted(CONFIGMAPS, "default", "a") == thing("a", 2)
    bench.cache.forget(CONFIGMAPS, "default", "a", "1")
    assert bench.cache.deleted(CONFIGMAPS, "default", "a") is None


def test_of_two_deleted_under_one_name_neither_is_lost() -> None:
    bench = Bench()
    bench.cache.gone(CONFIGMAPS, thing("a", 2, "1"))
    bench.cache.seen(CONFIGMAPS, thing("a", 3, "2"))
    bench.cache.gone(CONFIGMAPS, thing("a", 4, "2"))
    bench.changes.clear()
    assert bench.cache.deleted(CONFIGMAPS, "default", "a") == thing("a", 2, "1")
    bench.cache.forget(CONFIGMAPS, "default", "a", "1")
    assert bench.changes == ["a"]
    assert bench.cache.deleted(CONFIGMAPS, "default", "a") == thing("a", 4, "2")


def test_the_deletion_of_an_older_uid_leaves_the_newer_object() -> None:
    bench = Bench()
    bench.cache.seen(CONFIGMAPS, thing("a", 1, "1"))
    bench.cache.seen(CONFIGMAPS, thing("a", 3, "2"))
    bench.cache.gone(CONFIGMAPS, thing("a", 2, "1"))
    assert bench.version() == "3"
    assert bench.cache.deleted(CONFIGMAPS, "default", "a") == thing("a", 2, "1")


def test_a_list_corrects_and_is_corrected_by_what_is_newer() -> None:
    bench = Bench()
    bench.cache.seen(CONFIGMAPS, thing("a", 1, "1"))
    bench.cache.seen(CONFIGMAPS, thing("b", 9, "2"))
    bench.cache.seen(CONFIGMAPS, thing("c", 1, "3", namespace="elsewhere"))
    bench.changes.clear()
    bench.cache.replace(CONFIGMAPS, [thing("d", 4, "4")], "5", "default")
    assert bench.version("a") is None, "it was not in a list that is younger than it"
    assert bench.version("b") == "9", "it was made after the list"
    assert bench.version("d") == "4"
    assert bench.cache.get(CONFIGMAPS, "elsewhere", "c") is not None, "the list was of another namespace"
    assert bench.cache.deleted(CONFIGMAPS, "default", "a") is None, "absence is not deletion"
    assert sorted(bench.changes) == ["a", "d"]


def test_the_dead_do_not_fill_the_memory() -> None:
    bench = Bench()
    for number in range(100):
        bench.time += BURIED_SECONDS / 10
        bench.cache.gone(CONFIGMAPS, thing("a", 2 * number, str(number)))
        bench.cache.forget(CONFIGMAPS, "default", "a", str(number))
    assert len(bench.cache._buried) <= 12


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["touch", "delete", "lose", "repeat"]), st.sampled_from(NAMES)),
        st.tuples(st.just("list"), st.integers(0, 3)),
    ),
    max_size=40,
)


@given(ACTIONS, st.randoms(use_true_random=False))
async def test_after_any_gap_and_a_list_the_cache_is_the_cluster(actions: list[tuple[str, Any]], dice: Any) -> None:
    """Events come late, in any order among objects and more than once; some never; a list may be used long after it was made."""
    kube, bench = FakeKube(), Bench()
    news: list[tuple[str, Object]] = []
    lists: list[tuple[list[Object], str]] = []
    kube.subscribe(lambda what, resource, found: news.append((what, found)) if resource == CONFIGMAPS else None)

    def deliver(count: int) -> None:
        for _ in range(min(count, len(news))):
            what, found = news.pop(dice.randrange(len(news)))
            (bench.cache.gone if what == "DELETED" else bench.cache.seen)(CONFIGMAPS, found)

    for action, what in actions:
        if action == "touch":
            if await kube.get(CONFIGMAPS, "default", what) is None:
                await kube.create(CONFIGMAPS, "default", {"metadata": {"name": what}})
            else:
                await kube.merge_patch(CONFIGMAPS, "default", what, {"data": {"x": str(kube.version)}})
        elif action == "delete":
            if (found := await kube.get(CONFIGMAPS, "default", what)) is not None:
                await kube.delete(CONFIGMAPS, "default", what, uid=found["metadata"]["uid"])
        elif action == "list":
            lists.append(await kube.list(CONFIGMAPS, None))
            deliver(what)
        elif action == "repeat" and news:
            news.append(news[0])
        elif action == "lose" and news:
            news.pop(0)
        if lists and dice.random() < 0.3:
            bench.cache.replace(CONFIGMAPS, *lists.pop(dice.randrange(len(lists))))
    for old in lists:
        bench.cache.replace(CONFIGMAPS, *old)
    truth, version = await kube.list(CONFIGMAPS, None)
    bench.cache.replace(CONFIGMAPS, truth, version)
    deliver(len(news))
    assert sorted(bench.cache.items(CONFIGMAPS), key=lambda found: found["metadata"]["name"]) == truth
