"""Weights under TLS: the same bytes, not in clear, and only from whom a certificate vouches for."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from tests.weights.stage import NUM_ELEMENTS, publish, pull, stage, weights

from polyrl.weights.settings import Tls, TransferError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")


def certificate(folder: Path, names: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ("-subj", "/CN=weights", "-addext", f"subjectAltName={names}")
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1")
    subprocess.run([*made, "-keyout", key, "-out", cert, *subject], check=True, capture_output=True, timeout=30)
    return cert, key


def contexts(cert: Path, key: Path) -> Tls:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    return Tls(server, ssl.create_default_context(cafile=str(cert)))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return contexts(*certificate(tmp_path_factory.mktemp("tls")))


def test_full_versions_and_deltas_arrive_and_are_relayed(tls):
    with stage() as on:
        server, first, second = on.server(tls=tls), on.peer(0, tls=tls), on.peer(1, tls=tls)
        for version in (1, 2):
            offer = publish(server, version)
            assert pull(first, offer) == weights(version)
            assert pull(second, offer, first.addresses) == weights(version)
        assert first.num_bytes_sent > 2 * NUM_ELEMENTS


def test_who_does_not_speak_tls_gets_nothing(tls):
    with stage() as on:
        offer = publish(on.server(tls=tls), 1)
        with pytest.raises(
            TransferError, match=r"no source answers; .* hung up on our greeting: .*; --ca, if it serves with TLS"
        ):
            pull(on.peer(), offer, deadline_s=5)


def test_a_certificate_that_nobody_vouches_for_is_not_believed(tls, tmp_path):
    with stage() as on:
        offer = publish(on.server(tls=tls), 1)
        with pytest.raises(TransferError, match="certificate"):
            pull(on.peer(tls=contexts(*certificate(tmp_path))), offer, deadline_s=5)


def test_a_certificate_may_be_of_the_name_that_the_manager_was_dialled_by(tmp_path):
    named = contexts(*certificate(tmp_path, "DNS:trainer.example.com"))
    with stage() as on:
        offer = publish(on.server(tls=named), 1)
        with pytest.raises(TransferError, match="certificate"):
            pull(on.peer(tls=named), offer, deadline_s=5)
        assert pull(on.peer(tls=named._replace(name="trainer.example.com")), offer) == weights(1)


def test_a_worker_without_a_certificate_pulls_and_relays_nothing(tls):
    with stage() as on:
        peer = on.peer(tls=Tls(None, tls.client))
        assert pull(peer, publish(on.server(tls=tls), 1)) == weights(1)
        assert peer.addresses == ()
