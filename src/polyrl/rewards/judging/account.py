"""The account of a run's judges: requests, tokens, dollars, and when the next request may be sent.

    account = JudgeAccount(run_dir)
    account.admit(limits, tokens=900, now=time.monotonic(), within_s=20.0)     seconds to wait, None, or RewardStops
    account.send(is_retry=False)                                               a request that is counted
    account.pay(...)                                                           the cost of a reply

All judges of a run share one account, over all processes and over --resume: a file in the run's directory, changed
under a lock, in one write of a constant size. Without a run directory each process has an account of its own.

Rules kept here: a request is admitted before it is sent, and what it cost is added when its reply is there. So the
account may exceed a limit by the requests that are under way at that moment, and never by more.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from polyrl.errors import one_line
from polyrl.rewards.reward import RewardStops

FILE = "judge.json"
_RECORD_BYTES = 512
_MOST = 1e15
_LONGEST_WAIT_S = 600.0
"""A time further ahead than this is of a clock from before a reboot, and is ignored."""

_Amount = Annotated[float, Meta(ge=0, le=_MOST)]
_Count = Annotated[int, Meta(ge=0, le=int(_MOST))]


class JudgeTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The sums since the run began."""

    requests: _Count = 0
    """Requests that were sent."""
    retries: _Count = 0
    """Retries: requests that came after a failed one for the same answer."""
    replies: _Count = 0
    """Requests that were answered, whatever the answer was worth."""
    tokens_in: _Count = 0
    tokens_out: _Count = 0
    usd: _Amount = 0.0
    latency_s: _Amount = 0.0
    """The sum over replies."""
    next_request_at: float = 0.0
    """The time, by the machine's monotonic clock, before which no request is sent; the next one is of tokens."""
    next_tokens_at: float = 0.0

    @property
    def tokens(self) -> int:
        return self.tokens_in + self.tokens_out


class JudgeLimits(NamedTuple):
    max_usd: float | None = None
    max_tokens: int | None = None
    requests_per_minute: float = 0.0
    """0: any number; the next one too."""
    tokens_per_minute: float = 0.0


class JudgeAccount:
    """`folder` is the run's directory; None: the account is this process's own."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._own = JudgeTotals()

    def read(self) -> JudgeTotals:
        return self._change(lambda totals: totals)

    def admit(self, limits: JudgeLimits, *, tokens: int, now: float, within_s: float) -> float | None:
        """Admit a request of about so many tokens, and return the seconds to wait before it is sent.

        None: the rates allow none within `within_s` seconds, and it is not admitted. Raises RewardStops if the budget
        is used up.
        """
        waits: list[float] = []

        def act(totals: JudgeTotals) -> JudgeTotals:
            check_budget(totals, limits)
            wait_s, after = paced(totals, limits, tokens, now)
            if wait_s > within_s:
                return totals
            waits.append(wait_s)
            return after

        self._change(act)
        return waits[0] if waits else None

    def send(self, *, is_retry: bool) -> None:
        """Count a request that is sent now."""
        self._change(
            lambda totals: msgspec.structs.replace(
                totals, requests=totals.requests + 1, retries=totals.retries + is_retry
            )
        )

    def pay(
        self, limits: JudgeLimits, *, admitted: int, tokens_in: int, tokens_out: int, usd: float, latency_s: float
    ) -> None:
        """Add the cost of a reply to a request that was admitted with about so many tokens."""

        def act(totals: JudgeTotals) -> JudgeTotals:
            more_s = _seconds(tokens_in + tokens_out - admitted, limits.tokens_per_minute)
            return msgspec.structs.replace(
                totals,
                replies=totals.replies + 1,
                tokens_in=totals.tokens_in + tokens_in,
                tokens_out=totals.tokens_out + tokens_out,
                usd=totals.usd + usd,
                latency_s=totals.latency_s + latency_s,
                next_tokens_at=totals.next_tokens_at + more_s,
            )

        self._change(act)

    def _change(self, act: Callable[[JudgeTotals], JudgeTotals]) -> JudgeTotals:
        """Apply `act` under the lock, and return what it returned. A lock ends with the process that holds it."""
        if self._path is None:
            self._own = act(self._own)
            return self._own
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RewardStops(f"{self._path}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = _decode(os.pread(file, _RECORD_BYTES + 1, 0), self._path)
            after = act(before)
            if after != before:
                os.pwrite(file, msgspec.json.encode(after).ljust(_RECORD_BYTES - 1) + b"\n", 0)
            return after
        finally:
            os.close(file)


def check_budget(totals: JudgeTotals, limits: JudgeLimits) -> None:
    """Raise RewardStops if a limit is reached."""
    spent = f"{totals.tokens_in:,} tokens in and {totals.tokens_out:,} out in {totals.requests:,} requests"
    go_on = "raise it to go on with --resume"
    if limits.max_usd is not None and totals.usd >= limits.max_usd:
        raise RewardStops(
            f"judges have spent ${totals.usd:.6g} of rewards.max_usd = {limits.max_usd:g}: {spent}; {go_on}"
        )
    if limits.max_tokens is not None and totals.tokens >= limits.max_tokens:
        raise RewardStops(
            f"judges have used {totals.tokens:,} tokens of rewards.max_tokens = {limits.max_tokens}: {spent}; {go_on}"
        )


def paced(totals: JudgeTotals, limits: JudgeLimits, tokens: int, now: float) -> tuple[float, JudgeTotals]:
    """Return the seconds to wait before a request, and the totals once it is sent: evenly spaced, without bursts."""
    starts = [now]
    if limits.requests_per_minute:
        starts.append(_sane(totals.next_request_at, now))
    if limits.tokens_per_minute:
        starts.append(_sane(totals.next_tokens_at, now))
    start = max(starts)
    after = msgspec.structs.replace(
        totals,
        next_request_at=start + _seconds(1, limits.requests_per_minute),
        next_tokens_at=start + _seconds(tokens, limits.tokens_per_minute),
    )
    return start - now, after


def _sane(at: float, now: float) -> float:
    return at if at < now + _LONGEST_WAIT_S else now


def _seconds(amount: float, per_minute: float) -> float:
    return 60.0 * amount / per_minute if per_minute else 0.0


def _decode(raw: bytes, path: Path) -> JudgeTotals:
    if not raw.strip():
        return JudgeTotals()
    try:
        return msgspec.json.decode(raw, type=JudgeTotals)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RewardStops(f"{path}: is no account of judges: {one_line(error)}; put it back, or remove it") from error


class JudgeMeter:
    """The metrics of the account, as the trainer tells them after each step. `folder` None: there is no run."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._last = JudgeTotals()

    def take_metrics(self) -> dict[str, float]:
        """Return the sums of the run, and the mean latency since the last call; nothing where no judge was asked."""
        if self._path is None or not self._path.is_file():
            return {}
        try:
            now, before = _decode(self._path.read_bytes()[: _RECORD_BYTES + 1], self._path), self._last
        except (OSError, RewardStops):  # the judge itself says so
            return {}
        self._last = now
        found: dict[str, float] = {
            "reward/judge/requests": now.requests,
            "reward/judge/retries": now.retries,
            "reward/judge/tokens_in": now.tokens_in,
            "reward/judge/tokens_out": now.tokens_out,
            "reward/judge/usd": now.usd,
        }
        if now.replies > before.replies:
            found["reward/judge/latency_s/mean"] = (now.latency_s - before.latency_s) / (now.replies - before.replies)
        return found
