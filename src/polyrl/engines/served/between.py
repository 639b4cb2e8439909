"""What `installing`, in a worker, and `inside`, in a server, must agree on. Standard library only."""

import socket
import struct

SOCKET_VARIABLE = "POLYRL_WEIGHTS_SOCKET"
"""Where a server finds the name that its worker listens under. For a server that runs already, both are given it."""
KEY_VARIABLE = "POLYRL_ENGINE_KEY"
"""What a server that we start asks of whoever speaks to it; for one that runs already, its own, if it has one."""
LENGTH = struct.Struct("<Q")
"""Before every message, which is JSON."""
HEAD_BYTES = 1 << 18
"""Of a parameter that is read back, so much is compared: the server stands still meanwhile."""
_CREDENTIALS = struct.Struct("3i")


def peer_uid(connection: socket.socket) -> int:
    """The user that the process at the other end runs under."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1]
