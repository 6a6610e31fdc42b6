"""Create, read, list, patch and delete: what every adapter of the port does alike."""

from __future__ import annotations

from uuid import uuid4

import pytest
from tests.conformance.conftest import WIDGETS, Bench

from perdure_operator.kube import client
from perdure_operator.kube.client import CONFIGMAPS, NAMESPACES, PODS
from perdure_operator.kube.errors import KubeConflict, KubeInvalid, KubeNotFound

POD = {"spec": {"containers": [{"name": "a", "image": "a"}]}}


async def test_what_is_not_there(bench: Bench) -> None:
    assert await bench.kube.get(WIDGETS, bench.namespace, "nobody") is None
    assert await bench.kube.get(WIDGETS, "no-such-namespace", "nobody") is None
    assert await bench.kube.get(NAMESPACES, None, "no-such-namespace") is None
    with pytest.raises(KubeNotFound):
        await bench.kube.merge_patch(WIDGETS, bench.namespace, "nobody", {"spec": {"x": 2}})
    with pytest.raises(KubeNotFound):
        await bench.kube.json_patch(WIDGETS, bench.namespace, "nobody", [{"op": "test", "path": "/spec/x", "value": 1}])
    assert not await bench.kube.delete(WIDGETS, bench.namespace, "nobody", uid=str(uuid4()))
    with pytest.raises(KubeNotFound):
        await bench.kube.create(WIDGETS, "no-such-namespace", {"metadata": {"name": "a"}})


async def test_what_the_server_adds(bench: Bench) -> None:
    made = await bench.widget(status={"y": 1})
    metadata = made["metadata"]
    assert made["apiVersion"] == "test.perdure.dev/v1"
    assert made["kind"] == "Widget"
    assert metadata["uid"]
    assert metadata["resourceVersion"]
    assert metadata["creationTimestamp"]
    assert metadata["namespace"] == bench.namespace
    assert metadata["generation"] == 1
    assert "status" not in made
    assert await bench.read() == made


async def test_a_name_is_taken_once(bench: Bench) -> None:
    await bench.widget()
    with pytest.raises(KubeConflict) as caught:
        await bench.widget()
    assert caught.value.exists


async def test_names(bench: Bench) -> None:
    made = [await bench.kube.create(CONFIGMAPS, bench.namespace, {"metadata": {"generateName": "x-"}}) for _ in range(2)]
    names = {item["metadata"]["name"] for item in made}
    assert len(names) == 2
    assert all(name.startswith("x-") for name in names)
    for metadata in ({}, {"name": "Not_A_Name"}):
        with pytest.raises(KubeInvalid):
            await bench.kube.create(CONFIGMAPS, bench.namespace, {"metadata": metadata})


async def test_lists(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE", 2)
    other = await bench.new_namespace()
    for name, labels in (("a", {"team": "x"}), ("b", {"team": "x", "tier": "1"}), ("c", {"team": "y"}), ("d", {}), ("e", {})):
        await bench.kube.create(CONFIGMAPS, bench.namespace, {"metadata": {"name": name, "labels": labels}})
    await bench.kube.create(CONFIGMAPS, other, {"metadata": {"name": "elsewhere", "labels": {"team": "x"}}})

    async def names(labels: str = "", namespace: str | None = bench.namespace) -> list[str]:
        items, _ = await bench.kube.list(CONFIGMAPS, namespace, labels=labels)
        assert all(item["kind"] == "ConfigMap" and item["apiVersion"] == "v1" for item in items)
        return [item["metadata"]["name"] for item in items if item["metadata"]["namespace"] in (bench.namespace, other)]

    assert [name for name in await names() if not name.startswith("kube-root-ca")] == ["a", "b", "c", "d", "e"]
    assert await names("team=x") == ["a", "b"]
    assert await names("team=x,tier!=1") == ["a"]
    assert await names("team in (x, y),!tier") == ["a", "c"]
    assert await names("team notin (x),team") == ["c"]
    assert sorted(await names("team=x", None)) == ["a", "b", "elsewhere"]
    with pytest.raises(KubeInvalid):
        await names("team=!x)(")


async def test_a_list_is_not_older_than_the_last_write(bench: Bench) -> None:
    _, before = await bench.kube.list(WIDGETS, bench.namespace)
    made = await bench.widget()
    items, after = await bench.kube.list(WIDGETS, bench.namespace)
    assert items == [made]
    assert int(before) < int(made["metadata"]["resourceVersion"]) <= int(after)


async def test_a_merge_patch_merges_maps_replaces_lists_and_removes_nulls(bench: Bench) -> None:
    await bench.widget(spec={"keep": 1, "map": {"a": 1, "b": 2}, "list": [1, 2], "gone": 1})
    made = await bench.kube.merge_patch(
        WIDGETS, bench.namespace, "a", {"spec": {"map": {"b": 3, "c": {"d": 4}}, "list": [3], "gone": None}}
    )
    assert made["spec"] == {"keep": 1, "map": {"a": 1, "b": 3, "c": {"d": 4}}, "list": [3]}
    assert await bench.read() == made


async def test_generation_and_resource_version(bench: Bench) -> None:
    first = (await bench.widget())["metadata"]
    same = (await bench.kube.merge_patch(WIDGETS, bench.namespace, "a", {"spec": {"x": 1}}))["metadata"]
    assert (same["generation"], same["resourceVersion"]) == (1, first["resourceVersion"])
    labelled = (await bench.kube.merge_patch(WIDGETS, bench.namespace, "a", {"metadata": {"labels": {"a": "b"}}}))["metadata"]
    assert labelled["generation"] == 1
    assert int(labelled["resourceVersion"]) > int(first["resourceVersion"])
    changed = (await bench.kube.merge_patch(WIDGETS, bench.namespace, "a", {"spec": {"x": 2}}))["metadata"]
    assert changed["generation"] == 2


async def test_status_is_a_place_of_its_own(bench: Bench) -> None:
    await bench.widget()
    everything = {"metadata": {"labels": {"a": "b"}}, "spec": {"x": 5}, "status": {"y": 1}}
    made = await bench.kube.merge_patch(WIDGETS, bench.namespace, "a", everything, subresource="status")
    assert (made["spec"], made["status"], made["metadata"]["generation"]) == ({"x": 1}, {"y": 1}, 1)
    assert "labels" not in made["metadata"]
    made = await bench.kube.merge_patch(WIDGETS, bench.namespace, "a", {"status": {"y": 7}, "spec": {"x": 2}})
    assert (made["spec"], made["status"]) == ({"x": 2}, {"y": 1})
    operations = [
        {"op": "test", "path": "/metadata/uid", "value": made["metadata"]["uid"]},
        {"op": "add", "path": "/status", "value": {"z": 1}},
    ]
    made = await bench.kube.json_patch(WIDGETS, bench.namespace, "a", operations, subresource="status")
    assert (made["spec"], made["status"]) == ({"x": 2}, {"z": 1})


@pytest.mark.parametrize("subresource", ["", "status"])
async def test_preconditions_of_a_merge_patch(bench: Bench, subresource: str) -> None:
    first = (await bench.widget())["metadata"]
    part = subresource or "spec"

    async def patch(value: int, **metadata: str) -> int:
        body = {"metadata": metadata, part: {"x": value}}
        made = await bench.kube.merge_patch(WIDGETS, bench.namespace, "a", body, subresource=subresource)
        assert (await bench.read())[part]["x"] == made[part]["x"]
        return int(made[part]["x"])

    assert await patch(2, resourceVersion=first["resourceVersion"]) == 2
    assert await patch(3, uid=first["uid"]) == 3
    for metadata in ({"resourceVersion": first["resourceVersion"]}, {"uid": str(uuid4())}):
        with pytest.raises(KubeConflict) as caught:
            await patch(4, **metadata)
        assert not caught.value.exists
    assert (await bench.read())[part]["x"] == 3


@pytest.mark.parametrize("subresource", ["", "status"])
async def test_a_json_patch_is_done_whole_or_not_at_all(bench: Bench, subresource: str) -> None:
    made = await bench.widget()
    part = subresource or "spec"
    uid = {"op": "test", "path": "/metadata/uid", "value": made["metadata"]["uid"]}
    other = {"op": "test", "path": "/metadata/uid", "value": str(uuid4())}
    change = {"op": "add", "path": f"/{part}", "value": {"x": 2}}
    made = await bench.kube.json_patch(WIDGETS, bench.namespace, "a", [uid, change], subresource=subresource)
    assert made[part] == {"x": 2}
    for refused in ([other, {**change, "value": {"x": 3}}], [{"op": "test", "path": "/metadata/labels/none", "value": "x"}]):
        with pytest.raises(KubeConflict):
            await bench.kube.json_patch(WIDGETS, bench.namespace, "a", refused, subresource=subresource)
    with pytest.raises(KubeInvalid):
        await bench.kube.json_patch(WIDGETS, bench.namespace, "a", [{"op": "remove", "path": f"/{part}/q"}], subresource=subresource)
    assert await bench.read() == made


async def test_a_patch_cannot_rename(bench: Bench) -> None:
    await bench.widget()
    with pytest.raises(KubeInvalid):
        await bench.kube.merge_patch(WIDGETS, bench.namespace, "a", {"metadata": {"name": "b"}})


async def test_a_delete_is_of_one_uid(bench: Bench) -> None:
    made = await bench.widget()
    assert not await bench.kube.delete(WIDGETS, bench.namespace, "a", uid=str(uuid4()))
    assert await bench.read() == made
    assert await bench.kube.delete(WIDGETS, bench.namespace, "a", uid=made["metadata"]["uid"])
    assert await bench.kube.get(WIDGETS, bench.namespace, "a") is None
    again = await bench.widget()
    assert again["metadata"]["uid"] != made["metadata"]["uid"]


async def test_a_finalizer_holds_a_deleted_object(bench: Bench) -> None:
    made = await bench.widget(metadata={"finalizers": ["perdure.dev/cancel"]})
    uid = made["metadata"]["uid"]
    assert await bench.kube.delete(WIDGETS, bench.namespace, "a", uid=uid)
    held = await bench.read()
    assert held["metadata"]["deletionTimestamp"]
    assert held["metadata"]["generation"] == 2
    assert await bench.kube.delete(WIDGETS, bench.namespace, "a", uid=uid)
    assert await bench.read() == held
    with pytest.raises(KubeInvalid):
        await bench.kube.merge_patch(
            WIDGETS, bench.namespace, "a", {"metadata": {"finalizers": ["perdure.dev/cancel", "perdure.dev/more"]}}
        )
    await bench.kube.merge_patch(WIDGETS, bench.namespace, "a", {"status": {"y": 1}}, subresource="status")
    await bench.kube.merge_patch(WIDGETS, bench.namespace, "a", {"metadata": {"finalizers": None}})
    assert await bench.kube.get(WIDGETS, bench.namespace, "a") is None


async def test_propagation_is_written_as_a_finalizer(bench: Bench) -> None:
    """Who reads it is the garbage collector: see test_garbage.py."""
    for propagation, finalizer in (("Foreground", "foregroundDeletion"), ("Orphan", "orphan")):
        made = await bench.widget(finalizer.lower())
        assert await bench.kube.delete(
            WIDGETS, bench.namespace, made["metadata"]["name"], uid=made["metadata"]["uid"], propagation=propagation  # type: ignore[arg-type]
        )  # fmt: skip
        held = await bench.read(made["metadata"]["name"])
        assert held["metadata"]["finalizers"] == [finalizer]
        assert held["metadata"]["deletionTimestamp"]


async def test_a_pod_that_no_node_has_goes_at_once(bench: Bench) -> None:
    made = await bench.kube.create(PODS, bench.namespace, {"metadata": {"name": "p"}, **POD})
    assert made["status"]["phase"] == "Pending"
    assert await bench.kube.delete(PODS, bench.namespace, "p", uid=made["metadata"]["uid"], grace_seconds=5)
    assert await bench.kube.get(PODS, bench.namespace, "p") is None


async def test_a_pod_on_a_node_is_ended_by_its_kubelet(bench: Bench) -> None:
    # A node that does not exist: no kubelet interferes.
    made = await bench.kube.create(PODS, bench.namespace, {"metadata": {"name": "p"}, "spec": {**POD["spec"], "nodeName": "nowhere"}})
    uid = made["metadata"]["uid"]
    assert await bench.kube.delete(PODS, bench.namespace, "p", uid=uid, grace_seconds=5)
    held = await bench.kube.get(PODS, bench.namespace, "p")
    assert held is not None
    assert held["metadata"]["deletionGracePeriodSeconds"] == 5
    assert await bench.kube.delete(PODS, bench.namespace, "p", uid=uid, grace_seconds=0)
    assert await bench.kube.get(PODS, bench.namespace, "p") is None
