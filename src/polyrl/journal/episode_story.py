"""The part of a sample's story that only episodes have: its hosts, its calls, and its end by the environment.

Calls go by their number from 1 on. The journal has only those that the policy had to answer; those that were answered
again from the record, after a host was lost, are not in it.
"""

from collections.abc import Iterator, Sequence

from polyrl.ids import HostName, SampleId, Seconds
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import EnvironmentRules
from polyrl.scheduling.core.samples import TrackedSample
from polyrl.scheduling.parts.episodes import MAX_HOST_LOSSES


class EpisodeTeller:
    """Takes in events and commands, and returns the lines of one episode. Of any other sample it has nothing to say."""

    def __init__(self, sample: SampleId) -> None:
        self._id = sample
        self._host: HostName | None = None
        """The host that plays it, or played it last."""
        self._starts: list[int] = []
        """Tokens before each of its calls."""
        self.num_attempts = 0

    @property
    def is_episode(self) -> bool:
        return self._host is not None

    @property
    def num_calls(self) -> int:
        return len(self._starts)

    def tell_event(self, event: e.Event, before: TrackedSample | None) -> Iterator[str]:
        """Say what happened. `before` is the sample as it was."""
        if before is None or before.host < 0:
            return
        match event:
            case e.CallMade(sample=self._id) if event.attempt == before.attempt and before.state == "playing":
                yield self._call(event, before)
            case e.EpisodeEnded(sample=self._id) if event.attempt == before.attempt:
                yield f"ended by its environment at {self._host}: {event.outcome}, {self._so_far(event)}"
            case _:
                pass

    def tell_loss(self, event: e.Event, commands: Sequence[c.Command], sample: TrackedSample | None) -> Iterator[str]:
        """Say that the episode's host is gone, if this event took it away. `sample` is the sample as it is now."""
        for one in (event, *commands):
            match one:
                case e.HostLeft(host=self._host):
                    why = f"is gone ({one.reason})"
                case e.HostJoined(host=self._host):
                    why = "was started anew"
                case c.ForgetHost(host=self._host):
                    why = f"was given up ({one.why})"
                case _:
                    continue
            kept = 0 if sample is None else sample.num_tokens
            yield f"its host {self._host} {why}: it is to be begun again, {_several(kept, 'token')} of it are kept"
            return

    def tell_command(self, command: c.Command, waited_s: Seconds) -> Iterator[str]:
        match command:
            case c.PlayEpisode(sample=self._id):
                self._host = command.host
                self.num_attempts += 1
                again = "" if self.num_attempts == 1 else " again"
                yield f"begun{again} by {command.host} ({command.why}), after {waited_s:.1f} s of waiting"
            case c.StopEpisode(sample=self._id):
                scored = f"; it is scored with {command.num_tokens} tokens" if command.num_tokens >= 0 else ""
                yield f"stopped at {command.host}: {command.why}{scored}"
            case _:
                pass

    def started(self, from_token: int) -> str:
        """Say what a worker begins with a lease from that token on."""
        is_fresh = bool(self._starts) and from_token == self._starts[-1]
        return f"call {self.num_calls} " + ("given to" if is_fresh else f"resumed at token {from_token} on")

    def answered(self, worker: str) -> str:
        return f"call {self.num_calls} answered by {worker}"

    def _call(self, event: e.CallMade, before: TrackedSample) -> str:
        self._starts = [start for start in self._starts if start < event.start]
        self._starts.append(max(0, event.start))
        text = f"call {self.num_calls} made by {self._host}, after {_several(max(0, event.start), 'token')}"
        if event.num_tokens > event.start:
            text += f", {event.num_tokens - event.start} of its answer are there"
        lost = before.num_tokens - max(event.start, event.num_tokens)
        return f"{text}; it took another way: {_several(lost, 'token')} are thrown away" if lost > 0 else text

    def _so_far(self, event: e.EpisodeEnded) -> str:
        return f"{_several(self.num_calls, 'call')}, {_several(max(0, event.num_tokens), 'token')}"


def why_given_up(before: TrackedSample, sample: TrackedSample | None, rules: EnvironmentRules) -> str | None:
    """Return why an episode left its group, when that was for its environment or its hosts."""
    if sample is None or before.host < 0:
        return None
    if sample.num_faults > before.num_faults and sample.num_faults >= rules.max_attempts:
        return "its environment failed too often"
    return "all of its hosts were lost" if sample.num_losses >= MAX_HOST_LOSSES else None


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
