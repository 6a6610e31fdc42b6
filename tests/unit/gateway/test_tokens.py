"""Local tokens: who is let in, and that nothing else is."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure_operator.gateway.auth import Forbidden, LocalTokens, Person, PodIdentity, Unauthenticated, load_secret, make_secret

SECRET = b"s" * 32
POD = UUID("01a2009f-af84-7c5c-9269-fc103ce0e172")


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(clock: Clock) -> LocalTokens:
    return LocalTokens(SECRET, now=clock)


async def test_a_pod_is_who_its_token_says(tokens: LocalTokens) -> None:
    assert await tokens.pod(tokens.issue_pod(POD, "default/worker")) == PodIdentity(POD, "default/worker")


async def test_a_person_may_do_what_the_token_lists(tokens: LocalTokens) -> None:
    token = tokens.issue_person("ada", verbs=["get", "signal"], namespaces=["report"])
    assert await tokens.person(token, verb="signal", namespace="report", run="weekly") == Person("ada")
    with pytest.raises(Forbidden, match="ada may not cancel"):
        await tokens.person(token, verb="cancel", namespace="report", run="weekly")
    with pytest.raises(Forbidden, match="ada may not get in the namespace other"):
        await tokens.person(token, verb="get", namespace="other", run=None)
    with pytest.raises(Forbidden, match="in all namespaces"):
        await tokens.person(token, verb="get", namespace="-", run=None)


async def test_a_star_allows_everything(tokens: LocalTokens) -> None:
    token = tokens.issue_person("dev", verbs=["*"], namespaces=["*"])
    assert await tokens.person(token, verb="cancel", namespace="-", run=None) == Person("dev")


async def test_a_token_expires(tokens: LocalTokens, clock: Clock) -> None:
    pod = tokens.issue_pod(POD, "default/worker", ttl_seconds=60)
    person = tokens.issue_person("ada", verbs=["*"], namespaces=["*"], ttl_seconds=60)
    clock.now += 60
    for check in (tokens.pod(pod), tokens.person(person, verb="get", namespace="a", run=None)):
        with pytest.raises(Unauthenticated, match="expired"):
            await check


async def test_pods_and_people_are_not_mixed_up(tokens: LocalTokens) -> None:
    with pytest.raises(Forbidden, match="person's token"):
        await tokens.pod(tokens.issue_person("ada", verbs=["*"], namespaces=["*"]))
    with pytest.raises(Forbidden, match="pod's token"):
        await tokens.person(tokens.issue_pod(POD, "default/worker"), verb="get", namespace="default", run=None)


async def test_another_secret_is_refused(tokens: LocalTokens) -> None:
    other = LocalTokens(b"o" * 32, now=lambda: 1_000_000.0)
    with pytest.raises(Unauthenticated, match="secret"):
        await tokens.pod(other.issue_pod(POD, "default/worker"))


async def test_changed_claims_are_refused(tokens: LocalTokens) -> None:
    prefix, body, signature = tokens.issue_pod(POD, "default/worker").split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    claims["sub"] = str(uuid4())
    forged = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    with pytest.raises(Unauthenticated):
        await tokens.pod(f"{prefix}.{forged}.{signature}")


@given(position=st.integers(min_value=0), other=st.characters())
async def test_any_changed_character_is_refused(position: int, other: str) -> None:
    tokens = LocalTokens(SECRET, now=lambda: 0.0)
    token = tokens.issue_pod(POD, "default/worker")
    position %= len(token)
    changed = token[:position] + other + token[position + 1 :]
    if changed != token:
        with pytest.raises(Unauthenticated):
            await tokens.pod(changed)


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b.decode("latin-1")))
async def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(Unauthenticated):
        await LocalTokens(SECRET).pod(text)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        LocalTokens(b"short")


def test_the_secret_file_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    secret = make_secret(file)
    assert make_secret(file) == secret == load_secret(file)
    assert len(secret) >= 32
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others"):
        load_secret(file)
