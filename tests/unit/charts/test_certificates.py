"""What the chart issues convinces a sidecar, and only under the gateway's own names."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path

import pytest
from tests.harness.chart import MATRIX, NAMESPACE, QUICKSTART, RELEASE, render

from perdure.sidecar.config import from_environment

SERVICE = f"{RELEASE}-gateway.{NAMESPACE}.svc"


def issued(values: dict[str, object], folder: Path) -> tuple[ssl.SSLContext, str]:
    """The gateway's side of a handshake, and the PEM that sidecars are given."""
    data = {key: base64.b64decode(text) for key, text in render(values).one("Secret", f"{RELEASE}-gateway-tls")["data"].items()}
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_bytes(data[name])
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return server, data["ca.crt"].decode()


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> None:
    """Raises ssl.SSLCertVerificationError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=host)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [one, other]
    while waiting:
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue


def sidecars_trust(pem: str) -> ssl.SSLContext:
    settings = from_environment({"PERDURE_GATEWAY_URLS": f"https://{SERVICE}", "PERDURE_GATEWAY_CA": pem})
    assert settings.tls is not None
    # The default of newer Pythons.
    settings.tls.verify_flags |= ssl.VERIFY_X509_STRICT
    return settings.tls


@pytest.mark.parametrize("host", [SERVICE, f"{SERVICE}.cluster.local", "perdure.example.com", "localhost"])
def test_the_gateway_s_names_are_trusted(tmp_path: Path, host: str) -> None:
    server, pem = issued(MATRIX["everything"], tmp_path)
    shake_hands(sidecars_trust(pem), server, host)


def test_no_other_name_is(tmp_path: Path) -> None:
    server, pem = issued(QUICKSTART, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(sidecars_trust(pem), server, f"{RELEASE}-gateway.elsewhere.svc")


def test_no_other_release_s_authority_is(tmp_path: Path) -> None:
    server, _ = issued(QUICKSTART, tmp_path)
    _, other = issued(QUICKSTART, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(sidecars_trust(other), server, SERVICE)


def test_cert_manager_is_asked_for_the_same_names() -> None:
    [certificate] = render(MATRIX["cert-manager"]).of("Certificate")
    assert SERVICE in certificate["spec"]["dnsNames"]
    assert certificate["spec"]["issuerRef"] == {"name": "ca", "kind": "ClusterIssuer", "group": "cert-manager.io"}
