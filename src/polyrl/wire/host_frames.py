"""The frames between a host and the manager, over a WebSocket, in the form of frames.py.

    host    -> manager    HostHello first; then MakeCall, EndEpisode, HostReport, Leaving, Goodbye
    manager -> host       HostWelcome first; then Play, CallAnswer, StopPlaying, Release

A host says a call again after a break, and an end until it hears that the episode is over. A call that is said twice is
the same call: it has a number, and its prompt is compared. Prompts grow from call to call, so a frame holds only what
is new.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from polyrl.scheduling.core.bounds import MAX_REWARD
from polyrl.wire.columns import ANY_ID
from polyrl.wire.frames import Frame, Goodbye, Leaving, Natural, PeerText, Release, make_plain

MAX_HOST_FRAME_BYTES = 16 << 20
MAX_TASK_BYTES = 4 << 20
MAX_CALLS = 4096
"""Calls of one episode."""
FRAMES_A_SECOND = 50.0
"""Frames of a host for each of its episodes, of which `LEAST_EPISODES` are counted if it has fewer: an environment of a
few microseconds makes fewer calls than that. `FRAMES_AT_ONCE` may come in a moment."""
FRAMES_AT_ONCE = 600
LEAST_EPISODES = 8
MAX_STOP_IDS, MAX_STOPS, MAX_STOP_CHARACTERS = 256, 16, 256
MAX_PARTS = 32
"""Named parts of a reward that an environment may give; how many turns an episode had may be told beside them."""
PART_NAME = r"^[A-Za-z0-9_.-]{1,64}$(?!\n)"
EpisodeParts = Annotated[dict[Annotated[str, Meta(pattern=PART_NAME)], float], Meta(max_length=MAX_PARTS + 1)]
"""They become names of metrics."""


class HeldEpisode(Struct, frozen=True, array_like=True, gc=False):
    """An attempt at an episode."""

    sample: Natural
    attempt: Natural


# Host to manager


class HostHello(Frame, frozen=True, tag="host_hello"):
    """The first frame on every connection: the episodes that the host plays."""

    held: Annotated[tuple[HeldEpisode, ...], Meta(max_length=65_536)]
    draining: PeerText = ""
    """Why it wants to go, if it does."""

    def __post_init__(self) -> None:
        make_plain(self, "draining")


class MakeCall(Frame, frozen=True, tag="call", forbid_unknown_fields=True):
    """The environment asks the policy. The prompt is the first `kept` tokens of what call `base` was given and
    answered with, and then `tokens`."""

    sample: Natural
    attempt: Natural
    number: Annotated[int, Meta(ge=0, lt=MAX_CALLS)]
    base: Annotated[int, Meta(ge=-1, lt=MAX_CALLS)]
    """-1: none."""
    kept: Natural
    tokens: bytes
    max_tokens: Natural
    """0: as many as there is room for."""
    stop_ids: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], Meta(max_length=MAX_STOP_IDS)] = ()
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)], ...], Meta(max_length=MAX_STOPS)
    ] = ()


class EndEpisode(Frame, frozen=True, tag="end", forbid_unknown_fields=True):
    sample: Natural
    attempt: Natural
    outcome: Literal["scored", "failed"]
    num_calls: Natural
    """Calls whose answers the environment received."""
    reward: Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)] = 0.0
    parts: EpisodeParts = msgspec.field(default_factory=dict)
    why: PeerText = ""
    untrained: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_CALLS)], ...], Meta(max_length=MAX_CALLS)] = ()
    """Calls that another role than the trained one made of the policy, such as its opponent."""

    def __post_init__(self) -> None:
        make_plain(self, "why")


class HostReport(Frame, frozen=True, tag="host_report"):
    """A heartbeat."""

    num_playing: Natural


FromHost = HostHello | MakeCall | EndEpisode | HostReport | Leaving | Goodbye


# Manager to host


class HostWelcome(Frame, frozen=True, tag="host_welcome"):
    """The episodes of the host that are still wanted. Others are over."""

    held: tuple[HeldEpisode, ...]


class EpisodeOrder(Struct, frozen=True, array_like=True, gc=False):
    sample: int
    attempt: int
    index: int
    """The number of its task."""
    seed: int
    """The same for all attempts at a task in one group."""
    task: bytes
    """A row of the recipe's data, as JSON; empty where the environment brings its own tasks."""


class Play(Frame, frozen=True, tag="play"):
    episodes: tuple[EpisodeOrder, ...]
    max_context: int
    """Tokens that a prompt and its answer may have together; 0: unknown."""
    max_tokens: int
    """Drawn tokens that an episode may have."""
    vocabulary: int = ANY_ID
    """Token ids are below it."""
    turn_timeout_s: float = 600.0
    """An environment that takes longer after an answer is over its time."""


class CallAnswer(Frame, frozen=True, tag="answer"):
    sample: int
    attempt: int
    number: int
    cells: bytes
    finish: str
    no_room: str = ""
    """Why the call is not answered: its prompt fills the context, or the episode's tokens are spent."""


class StopPlaying(Frame, frozen=True, tag="stop_playing"):
    """These are over: ended and on file, or no longer wanted."""

    episodes: tuple[HeldEpisode, ...]


ToHost = HostWelcome | Play | CallAnswer | StopPlaying | Release

decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
