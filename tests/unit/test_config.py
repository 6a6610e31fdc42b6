"""What the environment tells gateway and operator, and what it is told when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure_operator.config import Address, ConfigError, GatewayConfig, OperatorConfig, TlsFiles

GATEWAY = {"PERDURE_DSN": "postgresql://x", "PERDURE_AUTH": "kubernetes"}
OPERATOR = {
    "PERDURE_DSN": "postgresql://x",
    "PERDURE_SIDECAR_IMAGE": "sidecar:1",
    "PERDURE_GATEWAY_URL": "https://gateway.perdure.svc",
    "PERDURE_INSTALLATION": "perdure-system.perdure",
}
TLS = {"PERDURE_TLS_CERT_FILE": "/tls.crt", "PERDURE_TLS_KEY_FILE": "/tls.key"}


def test_the_gateway_s_defaults() -> None:
    config = GatewayConfig.from_env(GATEWAY)
    assert (config.listen, config.tls, config.metrics_listen) == (Address("0.0.0.0", 8080), None, None)
    assert (config.auth, config.token_audience, config.lease_seconds) == ("kubernetes", "perdure-gateway", 15)


def test_with_a_certificate_the_gateway_is_on_its_tls_port() -> None:
    config = GatewayConfig.from_env({**GATEWAY, **TLS})
    assert (config.listen.port, config.tls) == (8443, TlsFiles(Path("/tls.crt"), Path("/tls.key")))
    assert GatewayConfig.from_env({**GATEWAY, **TLS, "PERDURE_LISTEN": "[::1]:1"}).listen == Address("::1", 1)


def test_a_token_secret_means_local_tokens() -> None:
    local = {"PERDURE_DSN": "x", "PERDURE_TOKEN_SECRET_FILE": "/secret"}
    assert GatewayConfig.from_env(local).auth == "local"
    assert GatewayConfig.from_env({**local, "PERDURE_AUTH": "kubernetes"}).auth == "kubernetes"


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"PERDURE_DSN": ""}, "PERDURE_DSN"),
        ({"PERDURE_AUTH": ""}, "PERDURE_AUTH is not set"),
        ({"PERDURE_AUTH": "none"}, "PERDURE_AUTH is 'none'; it may be kubernetes or local"),
        ({"PERDURE_AUTH": "local"}, "PERDURE_TOKEN_SECRET_FILE"),
        ({"PERDURE_LISTEN": "8080"}, "PERDURE_LISTEN"),
        ({"PERDURE_LISTEN": "h:70000"}, "PERDURE_LISTEN"),
        ({"PERDURE_METRICS_LISTEN": ":9090"}, "PERDURE_METRICS_LISTEN"),
        ({"PERDURE_TLS_CERT_FILE": "/a"}, "PERDURE_TLS_KEY_FILE"),
        ({"PERDURE_TLS_KEY_FILE": "/a"}, "PERDURE_TLS_CERT_FILE"),
        ({"PERDURE_LEASE_SECONDS": "soon"}, "PERDURE_LEASE_SECONDS"),
    ],
)
def test_what_is_wrong_with_a_gateway_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GatewayConfig.from_env({**GATEWAY, **env})


def test_the_operator_s_environment(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("PEM")
    plain = OperatorConfig.from_env(OPERATOR)
    assert (plain.watch_namespaces, plain.gateway_ca, plain.inline_templates) == ((), None, frozenset())
    assert (plain.sidecar_pull_policy, plain.resync_seconds, plain.metrics_listen) == ("IfNotPresent", 300, None)
    full = OperatorConfig.from_env(
        {
            **OPERATOR,
            "PERDURE_WATCH_NAMESPACES": "a, b",
            "PERDURE_GATEWAY_CA_FILE": str(tmp_path / "ca.crt"),
            "PERDURE_INLINE_TEMPLATES": "a,b",
            "PERDURE_METRICS_LISTEN": "0.0.0.0:9090",
            "PERDURE_OPERATOR_NAME": "me",
            "PERDURE_SIDECAR_RESOURCES": '{"limits": {"cpu": 2, "memory": "1Gi"}}',
        }
    )
    assert (plain.sidecar_resources, full.sidecar_resources) == (None, {"limits": {"cpu": "2", "memory": "1Gi"}})
    assert (full.watch_namespaces, full.gateway_ca, full.inline_templates) == (("a", "b"), "PEM", frozenset({"a", "b"}))
    assert (full.metrics_listen, full.name) == (Address("0.0.0.0", 9090), "me")
    assert OperatorConfig.from_env({**OPERATOR, "PERDURE_INLINE_TEMPLATES": "all"}).inline_templates == "all"


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"PERDURE_SIDECAR_IMAGE": ""}, "PERDURE_SIDECAR_IMAGE"),
        ({"PERDURE_GATEWAY_URL": ""}, "PERDURE_GATEWAY_URL"),
        ({"PERDURE_INSTALLATION": ""}, "PERDURE_INSTALLATION"),
        ({"PERDURE_SIDECAR_PULL_POLICY": "always"}, "PERDURE_SIDECAR_PULL_POLICY"),
        ({"PERDURE_RESYNC_SECONDS": "0"}, "PERDURE_RESYNC_SECONDS"),
        ({"PERDURE_SIDECAR_RESOURCES": "{"}, "PERDURE_SIDECAR_RESOURCES"),
        ({"PERDURE_SIDECAR_RESOURCES": '{"limit": {"cpu": "1"}}'}, "PERDURE_SIDECAR_RESOURCES"),
    ],
)
def test_what_is_wrong_with_an_operator_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        OperatorConfig.from_env({**OPERATOR, **env})
