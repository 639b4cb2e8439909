"""Check a certificate before it is used: whether clients will accept it, and under which names.

OpenSSL itself is asked, by a handshake in memory: its answer there is the one that a worker will get.
"""

import ssl
from typing import Any

from polyrl.errors import UserError
from polyrl.wire.credentials import client_tls, server_tls

_MAX_FLIGHTS = 4
"""The most message flights in each direction of a handshake; TLS needs two."""


class Certificate:
    """A server certificate that clients accept if they trust `ca`, or the system's authorities if `ca` is None."""

    def __init__(self, cert: str, key: str, ca: str | None) -> None:
        """Raises UserError for files that cannot be read, or do not belong together."""
        server, client = server_tls(cert, key), client_tls("https://", ca)
        assert server is not None and client is not None
        self.server, self.client = server, client
        unnamed = client_tls("https://", ca)
        assert unnamed is not None
        unnamed.check_hostname = False
        try:
            said = _shake_hands(server, unnamed, "")
        except ssl.SSLCertVerificationError as error:
            trusted = "what this system trusts" if ca is None else ca
            raise UserError(f"{cert}: not vouched for by {trusted}: {error.verify_message}") from error
        except ssl.SSLError as error:
            raise UserError(f"{cert}: no connection can be served with it: {error}") from error
        self.names = tuple(str(name) for _, name in said.get("subjectAltName", ()))

    def is_of(self, host: str) -> bool:
        """Return whether clients that dial this name or address accept the certificate."""
        try:
            _shake_hands(self.server, self.client, host)
        except (ssl.SSLError, ValueError):
            return False
        return True


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> dict[str, Any]:
    """Return the server's certificate as the client sees it. Raises ssl.SSLError if the client rejects it."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(down, up, server_hostname=host or None)
    far = server.wrap_bio(up, down, server_side=True)
    for side in (near, far) * _MAX_FLIGHTS:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        if side is near:
            return near.getpeercert() or {}
    raise ssl.SSLError("the handshake does not come to an end")
