"""The terms that `installing`, in a worker, and `inside`, in a server, share. Standard library only."""

import socket
import struct

SOCKET_VARIABLE = "POLYRL_WEIGHTS_SOCKET"
"""Where a server finds the name that its worker listens under. For a server that runs already, both are given it."""
KEY_VARIABLE = "POLYRL_ENGINE_KEY"
"""Names the key that a server of ours asks of every request; of one that runs already, its own key, if it has one."""
LENGTH = struct.Struct("<Q")
"""Before every message, which is JSON."""
HEAD_BYTES = 1 << 18
"""The bytes compared of a parameter that is read back; not all, since the server stands still meanwhile."""
_CREDENTIALS = struct.Struct("3i")


def peer_uid(connection: socket.socket) -> int:
    """Return the user that the process at the other end runs under."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)[1]
