"""What can be set about a manager, in a TOML file or as `section.key=value`."""

from ipaddress import ip_network
from typing import Annotated, Literal

from msgspec import Meta, Struct

FsyncPolicy = Literal["never", "interval", "always"]
MISSED_BEATS = 2
"""Heartbeats that may fail to come before a worker is given up: one of them alone is late, or lost, now and then."""
SettingSeconds = Annotated[float, Meta(gt=0, le=3600)]


class JournalSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fsync: FsyncPolicy = "interval"
    """When what was written must be on the disk itself. A killed manager loses nothing under any of them: its writes
    are with the operating system before they are acknowledged. It is for a machine that loses power."""
    fsync_interval_s: SettingSeconds = 1.0
    segment_mb: Annotated[float, Meta(gt=0, le=65536)] = 256.0
    """A file of the journal that has grown beyond this is followed by the next."""


class StreamSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    flush_interval_s: Annotated[float, Meta(ge=0.001, le=10)] = 0.05
    """How long a worker gathers tokens before it sends them."""
    heartbeat_interval_s: Annotated[float, Meta(ge=0.05, le=60)] = 1.0
    send_timeout_s: SettingSeconds = 30.0
    """A peer that takes nothing of what we send for so long is cut off. It dials again and gets what it missed."""
    max_queued_mb: Annotated[float, Meta(gt=0, le=65536)] = 1024.0
    """So is one for which more than this waits, beside prompts and answers, which are kept anyway."""


class LimitSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    joins_per_s: Annotated[float, Meta(gt=0)] = 20.0
    """From one address, averaged; a burst of ten seconds' worth is let through."""
    request_timeout_s: SettingSeconds = 10.0
    """Who has connected must have said what it wants within this time."""
    max_body_mb: Annotated[float, Meta(gt=0, le=64)] = 4.0
    connections_per_address: Annotated[int, Meta(ge=1)] = 256
    """That bring no request with a token: one more, and the oldest of them is cut. Streams do not count."""
    max_workers: Annotated[int, Meta(ge=1)] = 8192
    """At once. One more is told to try again later."""
    max_workers_per_address: Annotated[int, Meta(ge=1)] = 2048
    max_unfinished_mb: Annotated[float, Meta(ge=16)] = 256.0
    """Of workers' messages of which a part has come, all together: beyond it, the one begun first is cut off."""
    message_timeout_s: SettingSeconds = 60.0
    """A worker's message that is not whole after so long is cut off with its connection."""
    relay_networks: tuple[str, ...] = ()
    """Networks, written as CIDR, in which workers may name addresses to fetch weights at, beside the one that each
    of them dials from."""
    max_price_usd_per_hour: Annotated[float, Meta(ge=0, le=1e6)] = 1000.0
    """A worker that says it costs more is refused: the ledger adds up what workers say."""
    max_starting_s: Annotated[float, Meta(ge=0, le=1e6)] = 3600.0
    """At most so much time before a worker joined is in the ledger, however long its start was by its own word."""

    def __post_init__(self) -> None:
        for place, text in enumerate(self.relay_networks):
            try:
                ip_network(text, strict=False)
            except ValueError as error:
                raise ValueError(f"relay_networks.{place}: {text!r}; expected a network like 10.0.0.0/8") from error


class ServeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answering whoever asks beside the trainer (docs/guides/serve.md)."""

    model: Annotated[str, Meta(max_length=256)] = ""
    """The name that clients give; empty: that of the model's directory."""
    max_samples: Annotated[int, Meta(ge=0, le=65536)] = 256
    """Answers that may be asked for at once. Whoever asks for more waits and tries again; 0: nobody may ask."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=262144)] = 8192
    """The longest answer, where `--serve` opens the run; a trainer's run has its own bound."""
    token_timeout_s: SettingSeconds = 120.0
    """An answer that gets no token for so long, from any worker, is given up."""


class ManagerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    journal: JournalSettings = JournalSettings()
    stream: StreamSettings = StreamSettings()
    limits: LimitSettings = LimitSettings()
    serve: ServeSettings = ServeSettings()
    restart_grace_s: SettingSeconds = 10.0
    """How much longer than usual workers may take to dial in again after a restart of the manager."""
