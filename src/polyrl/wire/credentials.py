"""Access tokens with a scope, made once a run, kept in files that only their owner reads.

Six scopes. `worker` may join and stream; `host` may play episodes; `reward` may score answers; `generate` may ask for
answers (docs/guides/serve.md); `view` may look at the dashboard (docs/guides/dashboard.md); `admin` may do all of that
and everything else: open a run, submit rounds, read samples, drain.
A token is compared in constant time, and never logged or printed.

A client finds its token, in this order: `--token-file`, the environment variable POLYRL_TOKEN.
"""

import hmac
import os
import secrets
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from polyrl.disk import write_whole
from polyrl.errors import UserError

Scope = Literal["worker", "host", "reward", "generate", "view", "admin"]
TOKEN_VARIABLE = "POLYRL_TOKEN"
TOKEN_FILES: dict[Scope, str] = {
    "worker": "worker.token",
    "host": "host.token",
    "reward": "reward.token",
    "generate": "generate.token",
    "view": "view.token",
    "admin": "admin.token",
}
_TOKEN_BYTES = 32
_MIN_TOKEN_CHARACTERS = 16


class AccessTokens:
    """The tokens of a run, as the manager holds them."""

    def __init__(self, tokens: Mapping[Scope, str]) -> None:
        self._tokens: dict[Scope, bytes] = {scope: token.encode() for scope, token in tokens.items()}

    def scope_of(self, token: str) -> Scope | None:
        """Return the scope of a token; None for an unknown one. A wrong token takes as long to check as a right one."""
        given = token.encode(errors="replace")
        fits: list[Scope] = [scope for scope, token in self._tokens.items() if hmac.compare_digest(given, token)]
        return fits[-1] if fits else None

    def weights_key(self) -> str:
        """Return the run's key for weights, the same after a restart of the manager. It reveals nothing about the
        tokens."""
        return weights_key_of(self._tokens["worker"].decode()).hex()


def weights_key_of(worker_token: str) -> bytes:
    """Return the key by which those that serve and fetch a run's weights know each other."""
    return hmac.digest(worker_token.encode(), b"polyrl weights", "sha256")


def ensure_tokens(run_dir: Path) -> AccessTokens:
    """Return the run's tokens; made, readable by their owner alone, if they are not there."""
    return AccessTokens({scope: _ensure(run_dir / name) for scope, name in TOKEN_FILES.items()})


def _ensure(path: Path) -> str:
    """Read a token, made first if it is missing. No other process writes it: the caller holds the run's directory."""
    if not path.exists():
        write_whole(path, f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode(), 0o600)
    return read_token_file(path)


def read_token_file(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no token can be read there: {getattr(error, 'strerror', None) or error}") from error
    if len(token) < _MIN_TOKEN_CHARACTERS or not token.isprintable() or " " in token:
        raise UserError(f"{path}: expected a token of at least {_MIN_TOKEN_CHARACTERS} characters in a line")
    return token


def find_token(token_file: str | None, options: str = "--token-file") -> str:
    """Return the client's token. `options` are the command-line options that the UserError for a missing one names."""
    if token_file is not None:
        return read_token_file(Path(token_file))
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise UserError(
            f"no token: give {options}, or set {TOKEN_VARIABLE}; the manager keeps "
            f"{', '.join(TOKEN_FILES.values())} in its run directory"
        )
    return token


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def token_of(header: str | None) -> str:
    """Return the token of an Authorization header; empty if there is none."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def server_tls(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise UserError("--tls-cert and --tls-key belong together")
    for path in (cert, key):
        _check_readable(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def no_passphrase() -> str:
        raise UserError(f"{key}: asks for a passphrase; expected a key without one, that its owner alone can read")

    try:
        context.load_cert_chain(cert, key, no_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"{cert}, {key}: not a certificate and its key: {error}") from error
    return context


def client_tls(url: str, ca: str | None) -> ssl.SSLContext | None:
    """Return the context that checks the server of an https URL; None for plain http."""
    if not url.startswith(("https://", "wss://")):
        if ca is not None:
            raise UserError(f"{url}: --ca is for https")
        return None
    if ca is not None:
        _check_readable(ca)
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"{ca}: not a file of certificates: {error}") from error


def _check_readable(path: str) -> None:
    """OpenSSL does not say which file it missed."""
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
