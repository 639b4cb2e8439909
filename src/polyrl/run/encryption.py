"""TLS for a run: the certificate of `[manager]`, and the host name in it, which all peers dial.

One certificate serves the manager's port and the weights: they come from the same machine. So a worker checks the
weights' connections against the name under which it dialled the manager, at any address.
"""

import asyncio
import ssl
from ipaddress import ip_address
from itertools import islice
from socket import getfqdn
from typing import NamedTuple

from polyrl.config.recipe import ManagerSection
from polyrl.errors import UserError
from polyrl.weights.interfaces import listening_addresses
from polyrl.weights.settings import Tls
from polyrl.wire.certificate import Certificate
from polyrl.wire.dial import Dialer, Unreachable, pauses

_TRIES = 8


class Encryption(NamedTuple):
    host: str
    """The host that all peers dial."""
    server: ssl.SSLContext
    client: ssl.SSLContext

    @property
    def of_weights(self) -> Tls:
        return Tls(self.server, self.client, self.host)

    def url(self, port: int) -> str:
        return f"https://[{self.host}]:{port}" if ":" in self.host else f"https://{self.host}:{port}"


def encryption(wanted: ManagerSection) -> Encryption | None:
    """Load the certificate; None without one. Raises UserError, with the key, for one that no worker would accept."""
    if not wanted.tls_cert:
        return None
    try:
        found = Certificate(wanted.tls_cert, wanted.tls_key, wanted.ca or None)
    except UserError as error:
        hint = "" if wanted.ca else "; manager.ca names whom to trust: of one that signed itself, the certificate"
        raise UserError(f"manager: {error}{hint if 'not vouched for' in str(error) else ''}") from error
    for host in (*_listens_on(wanted.host), *(name for name in found.names if "*" not in name)):
        if found.is_of(host):
            return Encryption(host, found.server, found.client)
    names = ", ".join(found.names) or "no name"
    raise UserError(
        f"manager.tls_cert: {wanted.tls_cert} is of {names}; expected a name or an address that workers can dial, as a "
        "subjectAltName"
    )


def _listens_on(host: str) -> tuple[str, ...]:
    """Return the names and addresses under which other machines may reach a manager that listens on `host`."""
    try:
        is_all = ip_address(host).is_unspecified
    except ValueError:  # a name
        return (host,)
    return (*listening_addresses(()), getfqdn()) if is_all else (host,)


async def check_reachable(dialer: Dialer) -> None:
    """Check that the certificate's name leads to the manager from this machine too. Raises UserError."""
    said = ""
    async with dialer:
        for pause in islice(pauses(), _TRIES):
            try:
                await dialer.get("/v1/health", dict)
                return
            except Unreachable as error:
                said = str(error)
            await asyncio.sleep(pause)
    raise UserError(f"manager.tls_cert: the name that it is of does not lead to the manager from here: {said}")
