"""What is refused: whoever asked is told why, it is counted, and everything goes on."""


class RequestError(Exception):
    """What somebody asked for cannot be: they are told, and everything goes on."""


class Refused(RequestError):
    """A peer said what cannot be. `kind` is what it is counted as."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
