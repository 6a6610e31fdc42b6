"""What happens to dependents: cases for the fake's garbage collector and for that of a cluster. Each is given a bench, and how to wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.conformance.conftest import WIDGETS, Bench

from perdure_operator.kube.client import NAMESPACES, Object, Propagation

OURS = "perdure.dev/cancel"
Until = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]
"""Returns when the condition holds, raises where it does not come to hold."""


async def family(bench: Bench, *, blocks: bool = True, held: bool = True) -> tuple[Object, Object, Object]:
    """Parent, child and grandchild; ``held``: each with our finalizer."""
    made: list[Object] = []
    for name in ("parent", "child", "grandchild"):
        metadata: Object = {"finalizers": [OURS]} if held else {}
        if made:
            owner = made[-1]["metadata"]
            metadata["ownerReferences"] = [
                {
                    "apiVersion": WIDGETS.api_version,
                    "kind": WIDGETS.kind,
                    "name": owner["name"],
                    "uid": owner["uid"],
                    "blockOwnerDeletion": blocks,
                }
            ]
        made.append(await bench.widget(name, metadata=metadata))
    return made[0], made[1], made[2]


async def delete(bench: Bench, made: Object, propagation: Propagation) -> None:
    assert await bench.kube.delete(WIDGETS, bench.namespace, made["metadata"]["name"], uid=made["metadata"]["uid"], propagation=propagation)


async def release(bench: Bench, name: str) -> None:
    left = [finalizer for finalizer in (await bench.read(name))["metadata"]["finalizers"] if finalizer != OURS]
    await bench.kube.merge_patch(WIDGETS, bench.namespace, name, {"metadata": {"finalizers": left or None}})


async def marked(bench: Bench, name: str) -> bool:
    return "deletionTimestamp" in (await bench.read(name))["metadata"]


async def gone(bench: Bench, *names: str) -> bool:
    return not [name for name in names if await bench.kube.get(WIDGETS, bench.namespace, name)]


async def background_takes_dependents_when_the_owner_is_gone(bench: Bench, until: Until) -> None:
    await family(bench)
    await delete(bench, await bench.read("parent"), "Background")
    assert await marked(bench, "parent")
    assert not await marked(bench, "child"), "nothing is told to dependents while the owner is held"
    await release(bench, "parent")
    await until(lambda: marked(bench, "child"))
    assert not await marked(bench, "grandchild")
    await release(bench, "child")
    await until(lambda: marked(bench, "grandchild"))
    await release(bench, "grandchild")
    await until(lambda: gone(bench, "parent", "child", "grandchild"))


async def foreground_waits_for_dependents_that_block(bench: Bench, until: Until) -> None:
    await family(bench)
    await delete(bench, await bench.read("parent"), "Foreground")
    await until(lambda: marked(bench, "child"))
    await until(lambda: marked(bench, "grandchild"))
    await release(bench, "parent")
    assert (await bench.read("parent"))["metadata"]["finalizers"] == ["foregroundDeletion"]
    await release(bench, "grandchild")
    await release(bench, "child")
    await until(lambda: gone(bench, "parent", "child", "grandchild"))


async def foreground_does_not_wait_for_the_others(bench: Bench, until: Until) -> None:
    await family(bench, blocks=False)
    await delete(bench, await bench.read("parent"), "Foreground")
    await release(bench, "parent")
    await until(lambda: gone(bench, "parent"))
    await until(lambda: marked(bench, "child"))
    for name in ("child", "grandchild"):
        await until(lambda name=name: marked(bench, name))  # type: ignore[misc]
        await release(bench, name)
    await until(lambda: gone(bench, "child", "grandchild"))


async def orphan_frees_dependents(bench: Bench, until: Until) -> None:
    await family(bench)
    await delete(bench, await bench.read("parent"), "Orphan")

    async def freed() -> bool:
        return not (await bench.read("child"))["metadata"].get("ownerReferences")

    async def only_ours_is_left() -> bool:
        return (await bench.read("parent"))["metadata"]["finalizers"] == [OURS]

    await until(freed)
    await until(only_ours_is_left)
    await release(bench, "parent")
    await until(lambda: gone(bench, "parent"))
    assert not await marked(bench, "child")
    assert (await bench.read("grandchild"))["metadata"]["ownerReferences"]
    for name in ("child", "grandchild"):
        await release(bench, name)


async def a_second_owner_keeps_a_dependent(bench: Bench, until: Until) -> None:
    parent, other = await bench.widget("parent"), await bench.widget("other")
    owners = [
        {"apiVersion": WIDGETS.api_version, "kind": WIDGETS.kind, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
        for owner in (parent, other)
    ]
    await bench.widget("child", metadata={"ownerReferences": owners})
    await delete(bench, parent, "Background")
    await until(lambda: gone(bench, "parent"))
    await delete(bench, other, "Background")
    await until(lambda: gone(bench, "child"))


async def a_namespace_goes_when_it_is_empty(bench: Bench, until: Until) -> None:
    await bench.widget("held", metadata={"finalizers": [OURS]})
    await bench.widget("free")
    home = await bench.kube.get(NAMESPACES, None, bench.namespace)
    assert home is not None
    assert await bench.kube.delete(NAMESPACES, None, bench.namespace, uid=home["metadata"]["uid"])
    await until(lambda: gone(bench, "free"))
    await until(lambda: marked(bench, "held"))
    await release(bench, "held")

    async def left() -> bool:
        return await bench.kube.get(NAMESPACES, None, bench.namespace) is None

    await until(left)


CASES = (
    background_takes_dependents_when_the_owner_is_gone,
    foreground_waits_for_dependents_that_block,
    foreground_does_not_wait_for_the_others,
    orphan_frees_dependents,
    a_second_owner_keeps_a_dependent,
    a_namespace_goes_when_it_is_empty,
)
