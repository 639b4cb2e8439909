"""The manager's settings, from a TOML file or as `section.key=value`."""

from ipaddress import ip_network
from typing import Annotated, Literal

from msgspec import Meta, Struct

FsyncPolicy = Literal["never", "interval", "always"]
MISSED_BEATS = 2
"""Heartbeats that may be missing before a worker is given up: a single one is late, or lost, now and then."""
SettingSeconds = Annotated[float, Meta(gt=0, le=3600)]


class JournalSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fsync: FsyncPolicy = "interval"
    """When the journal must be on the disk itself. A killed manager loses nothing under any policy: its writes are with
    the operating system before they are acknowledged. The policy is for a machine that loses power."""
    fsync_interval_s: SettingSeconds = 1.0
    segment_mb: Annotated[float, Meta(gt=0, le=65536)] = 256.0
    """The size beyond which a file of the journal is followed by the next."""


class StreamSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    flush_interval_s: Annotated[float, Meta(ge=0.001, le=10)] = 0.05
    """How long a worker gathers tokens before it sends them."""
    heartbeat_interval_s: Annotated[float, Meta(ge=0.05, le=60)] = 1.0
    send_timeout_s: SettingSeconds = 30.0
    """A peer that reads nothing for this long is cut off. It dials again and gets what it missed."""
    max_queued_mb: Annotated[float, Meta(gt=0, le=65536)] = 1024.0
    """A peer is cut off too when more than this is queued for it, beside prompts and answers, which are kept anyway."""


class LimitSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    joins_per_s: Annotated[float, Meta(gt=0)] = 20.0
    """Joins from one address, on average; a burst of ten seconds' worth is let through."""
    request_timeout_s: SettingSeconds = 10.0
    """A new connection must bring a whole request within this time."""
    max_body_mb: Annotated[float, Meta(gt=0, le=64)] = 4.0
    connections_per_address: Annotated[int, Meta(ge=1)] = 256
    """Connections that bring no request with a token: one more, and the oldest is cut. Streams do not count."""
    max_workers: Annotated[int, Meta(ge=1)] = 8192
    """Workers at once. The next one is told to try again later."""
    max_workers_per_address: Annotated[int, Meta(ge=1)] = 2048
    max_unfinished_mb: Annotated[float, Meta(ge=16)] = 256.0
    """The size of all messages of workers of which only a part has come. Beyond it, the one begun first is cut off."""
    message_timeout_s: SettingSeconds = 60.0
    """A worker's message that is not whole after so long is cut off with its connection."""
    relay_networks: tuple[str, ...] = ()
    """Networks, written as CIDR, in which workers may name addresses to fetch weights at, beside the one that each
    of them dials from."""
    max_price_usd_per_hour: Annotated[float, Meta(ge=0, le=1e6)] = 1000.0
    """A worker that says it costs more is refused: the ledger adds up what workers say."""
    max_starting_s: Annotated[float, Meta(ge=0, le=1e6)] = 3600.0
    """The most time before its join that is paid for in the ledger, however long a worker says that its start took."""

    def __post_init__(self) -> None:
        for place, text in enumerate(self.relay_networks):
            try:
                ip_network(text, strict=False)
            except ValueError as error:
                raise ValueError(f"relay_networks.{place}: {text!r}; expected a network like 10.0.0.0/8") from error


class ServeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answering OpenAI's clients beside the trainer (docs/guides/serve.md)."""

    model: Annotated[str, Meta(max_length=256)] = ""
    """The model's name for clients; empty: that of its directory."""
    max_samples: Annotated[int, Meta(ge=0, le=65536)] = 256
    """Answers that may be in progress at once. A client that wants more is told to try again; 0: none."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=262144)] = 8192
    """The longest answer, where `--serve` opens the run; a trainer's run has its own bound."""
    token_timeout_s: SettingSeconds = 120.0
    """An answer that gets no token for this long, from any worker, is given up."""


class ManagerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    journal: JournalSettings = JournalSettings()
    stream: StreamSettings = StreamSettings()
    limits: LimitSettings = LimitSettings()
    serve: ServeSettings = ServeSettings()
    restart_grace_s: SettingSeconds = 10.0
    """How much longer than usual workers may take to dial in again after a restart of the manager."""
