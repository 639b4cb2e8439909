"""What is refused: whoever asked is told why, it is counted, and everything goes on."""

from polyrl.errors import plain

_MAX_CHARACTERS = 2000


class RequestError(Exception):
    """What somebody asked for cannot be: they are told, and everything goes on."""


class Refused(RequestError):
    """A peer said what cannot be. `kind` is what it is counted as."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(plain(reason)[:_MAX_CHARACTERS])
        self.kind = kind
