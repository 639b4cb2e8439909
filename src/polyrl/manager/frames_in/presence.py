"""Which connection speaks for a session: its newest one. Frames of any other are not heard."""

from typing import Protocol

from polyrl.manager.lobby import Lobby
from polyrl.manager.peers.link import Link


class Connected(Protocol):
    """A session, of which at most one connection is present."""

    link: Link | None


def is_present(lobby: Lobby, known: Connected | None, session: Connected, link: Link) -> bool:
    """Return whether this is the present connection of the session that is `known` by its name; close any other."""
    if known is session and session.link is link:
        lobby.num_frames += 1
        return True
    link.close("that session is over, or has another connection")
    return False
