"""The environment says what the pod is, or says what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.sidecar.config import ConfigError, from_environment

GATEWAY = {"PERDURE_GATEWAY_URLS": "http://a:1"}


def test_the_defaults() -> None:
    settings = from_environment(GATEWAY)
    assert (settings.port, settings.socket, settings.reuse) == (4555, Path("/run/perdure/agent.sock"), False)
    assert not settings.socket_required
    assert settings.token() is None


def test_gateways_are_parsed() -> None:
    settings = from_environment({"PERDURE_GATEWAY_URLS": " http://a:1/ , https://b, http://[::1]:80,http://[fe80::1] "})
    assert [(gateway.host, gateway.port, gateway.tls) for gateway in settings.gateways] == [
        ("a", 1, False),
        ("b", 443, True),
        ("::1", 80, False),
        ("fe80::1", 80, False),
    ]


def test_the_token_is_read_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    settings = from_environment({**GATEWAY, "PERDURE_TOKEN_FILE": str(file)})
    with pytest.raises(OSError, match="token"):
        settings.token()
    file.write_text("one\n")
    assert settings.token() == "one"
    file.write_text("two\n")
    assert settings.token() == "two"


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"PERDURE_GATEWAY_URLS": " , "}, "PERDURE_GATEWAY_URLS"),
        ({"PERDURE_GATEWAY_URLS": "a:1"}, "PERDURE_GATEWAY_URLS"),
        ({"PERDURE_GATEWAY_URLS": "ws://a:1"}, "PERDURE_GATEWAY_URLS"),
        ({"PERDURE_GATEWAY_URLS": "http://a:x"}, "PERDURE_GATEWAY_URLS"),
        ({"PERDURE_GATEWAY_URLS": "http://:1"}, "PERDURE_GATEWAY_URLS"),
        ({"PERDURE_GATEWAY_URLS": "http://a:1/v1"}, "PERDURE_GATEWAY_URLS"),
        ({"PERDURE_GATEWAY_URLS": "https://a", "PERDURE_GATEWAY_CA": "/etc/ca.crt"}, "PERDURE_GATEWAY_CA"),
        ({**GATEWAY, "PERDURE_POD_REUSE": "forkperrun"}, "PERDURE_POD_REUSE"),
        ({**GATEWAY, "PERDURE_PORT": "70000"}, "PERDURE_PORT"),
        ({**GATEWAY, "PERDURE_PORT": "-1"}, "PERDURE_PORT"),
        ({**GATEWAY, "PERDURE_LOG_LEVEL": "loud"}, "PERDURE_LOG_LEVEL"),
        ({**GATEWAY, "PERDURE_SOCKET": "off", "PERDURE_PORT": "off"}, "PERDURE_PORT"),
        ({**GATEWAY, "PERDURE_SOCKET": "off", "PERDURE_POD_REUSE": "ForkPerRun"}, "PERDURE_SOCKET"),
    ],
)
def test_what_is_wrong_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_environment(env)
