"""An engine with continuous batching, as lock-step decoding that flows: exact between changes, no loop over tokens.

A decode step gives every running sample one token and takes

    (step_fixed_s + step_sample_s * b + step_context_s * C) / speed      seconds

with b running samples and C tokens of context in the cache (prompts and answers). C grows by b a step, so the time of x
steps is quadratic in x and has an inverse. The model keeps one number, the position: how many steps the engine has made
since it was last empty. A sample is at `position - origin` tokens and finishes at a position known when it is admitted.

Rules it keeps:
- Time is passed in and never goes back. A sample that finishes at `now` does so before anything else happens then.
- Samples wait in order of arrival for a slot and for room in the cache; one sample alone may always run.
- Admission stops all decoding while it prefills prompt and tokens so far. A sample that shares its prefix with one that
  runs prefills only its own tokens and one more; one whose context is still in the cache, which the caller says, what
  is new.
- A full cache preempts the newest sample: its whole tokens stay, it waits first in line, and pays its prefill again.
- Token counts are whole; a fraction of a token is lost when a sample leaves the batch.

It leaves out: chunked prefill beside decoding, the room of what is kept in the cache after its last sample left,
prefixes stored once for many samples (C counts every prompt), cache blocks, sampling, and the start of the engine
itself.
"""

from collections import OrderedDict
from heapq import heappop, heappush
from math import sqrt

from msgspec import Struct

from polyrl.ids import Seconds

_SAME_POSITION = 1e-9
"""Positions closer than this are one moment: samples that were admitted together finish together."""
_WHOLE_TOKEN = 1e-6
"""A token is whole when less than this is missing: positions carry rounding."""
_ADMISSION_MARGIN = 0.01
"""Share of the cache that admission leaves free (as vLLM's watermark), so that a newcomer is not preempted at once."""


class EngineTimes(Struct, frozen=True, kw_only=True):
    """Constants of an engine. The time of a step is the formula above, at speed 1."""

    step_fixed_s: Seconds
    """May be negative, as long as a step with one sample is not."""
    step_sample_s: Seconds = 0.0
    step_context_s: Seconds = 0.0
    prefill_tokens_per_s: float
    kv_tokens: float
    """Tokens that fit into the cache; infinity: any number."""
    slots: int


class _Sample:
    __slots__ = ("cached_tokens", "lease", "order", "origin", "prefix", "prompt_tokens", "tokens", "total_tokens")

    def __init__(
        self, lease: int, prompt_tokens: int, tokens: int, total_tokens: int, prefix: int | None, cached_tokens: int
    ) -> None:
        self.lease = lease
        self.prompt_tokens = prompt_tokens
        self.tokens = tokens  # as of its latest admission, or while it waits
        self.total_tokens = total_tokens
        self.prefix = prefix
        self.cached_tokens = cached_tokens  # of its context, until it is admitted
        self.origin = 0.0
        self.order = -1  # number of its latest admission; -1 while it waits


class EngineModel:
    """An engine. Call `advance(now)` to collect the samples that finished; moments must not go back."""

    def __init__(self, engine: EngineTimes, speed: float = 1.0) -> None:
        self._fixed_s = engine.step_fixed_s / speed
        self._sample_s = engine.step_sample_s / speed
        self._context_s = engine.step_context_s / speed
        self._prefill_s = 1.0 / (engine.prefill_tokens_per_s * speed)
        self._kv_tokens = engine.kv_tokens
        self._margin = _ADMISSION_MARGIN * engine.kv_tokens
        self._slots = engine.slots

        self._running: dict[int, _Sample] = {}  # in order of admission
        self._waiting: OrderedDict[int, _Sample] = OrderedDict()
        self._prefixes: dict[int, int] = {}  # running samples of each
        self._finishes: list[tuple[float, int, _Sample]] = []  # a heap; entries of samples that left stay until popped
        self._finished: list[tuple[int, int, Seconds]] = []
        self._num_admissions = 0
        self._num_preemptions = 0
        self._decoded_by_departed = 0

        self._position = 0.0
        self._decoding_from: Seconds = 0.0  # the moment of `_position`; later than now while a prefill stalls the batch
        self._context_at_zero = 0.0  # C = this + b * position
        self._next_is_known = True
        self._next_at: Seconds | None = None
        self._next_position = 0.0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def start(
        self,
        lease: int,
        now: Seconds,
        *,
        prompt_tokens: int,
        from_token: int,
        total_tokens: int,
        prefix: int | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """Take a sample that has `from_token` tokens and naturally ends at `total_tokens`.

        `cached_tokens` of its prompt and tokens are in the cache from before.
        """
        if lease in self._running or lease in self._waiting:
            raise ValueError(f"lease {lease} started twice on one engine; leases are never reused")
        if total_tokens < from_token:
            raise ValueError(f"lease {lease} starts at token {from_token}, after its end at {total_tokens}")
        self._settle(now)
        self._waiting[lease] = _Sample(lease, prompt_tokens, from_token, total_tokens, prefix, cached_tokens)
        if len(self._waiting) == 1:
            self._move_to(now)
            self._admit()

    def stop(self, lease: int, now: Seconds) -> int | None:
        """Remove a sample and say how many tokens it has; none when it is not here (unknown, or finished by now)."""
        self._settle(now)
        waiting = self._waiting.pop(lease, None)
        sample = waiting if waiting is not None else self._running.get(lease)
        if sample is None:
            return None
        self._move_to(now)
        if waiting is None:
            self._remove(sample, self._tokens_of(sample, self._position))
        self._admit()
        return sample.tokens

    def advance(self, now: Seconds) -> list[tuple[int, int, Seconds]]:
        """Return `(lease, tokens, at)` of the samples that finished up to `now` and were not yet told, in order."""
        self._settle(now)
        finished, self._finished = self._finished, []
        return finished

    def next_change(self) -> Seconds | None:
        """Return when the next sample finishes or is preempted if none comes or goes; none while nothing runs."""
        if not self._next_is_known:
            self._find_next()
        return self._next_at

    def progress(self, now: Seconds) -> tuple[list[int], list[int]]:
        """Leases and their absolute token counts: the running ones by admission, then the waiting ones."""
        self._settle(now)
        reached = self._position_at(now) + _WHOLE_TOKEN
        leases = [*self._running, *self._waiting]
        tokens = [int(reached - sample.origin) for sample in self._running.values()]
        tokens += [sample.tokens for sample in self._waiting.values()]
        return leases, tokens

    def kv_used(self, now: Seconds) -> int:
        """Return the tokens of context in the cache."""
        self._settle(now)
        return int(self._context_at_zero + len(self._running) * self._position_at(now) + _WHOLE_TOKEN)

    def tokens_decoded(self, now: Seconds) -> int:
        """Count the tokens made here since the beginning, those of stopped samples too. It costs a pass over the
        batch."""
        self._settle(now)
        position = self._position_at(now)
        running = self._running.values()
        return self._decoded_by_departed + sum(self._tokens_of(sample, position) - sample.tokens for sample in running)

    def _settle(self, now: Seconds) -> None:
        while (at := self.next_change()) is not None and at <= now:
            self._play_change(at)

    def _play_change(self, at: Seconds) -> None:
        """Finish the samples that are at their end; if it is none, the cache is full."""
        self._position, self._decoding_from = self._next_position, at
        ends_by = self._position + _SAME_POSITION
        num_finished = 0
        while (first := self._first_to_finish()) is not None and first.origin + first.total_tokens <= ends_by:
            self._remove(first, first.total_tokens)
            self._finished.append((first.lease, first.total_tokens, at))
            num_finished += 1
        if num_finished == 0:
            self._preempt_newest()
        self._admit()

    def _preempt_newest(self) -> None:
        newest = self._running[next(reversed(self._running))]
        self._remove(newest, self._tokens_of(newest, self._position))
        self._waiting[newest.lease] = newest
        self._waiting.move_to_end(newest.lease, last=False)
        self._num_preemptions += 1

    def _admit(self) -> None:
        """Move samples from the front of the queue into the batch while they fit. The position must be of now."""
        self._next_is_known = False
        while self._waiting and len(self._running) < self._slots:
            sample = next(iter(self._waiting.values()))
            num_running = len(self._running)
            context = self._context_at_zero + num_running * self._position + sample.prompt_tokens + sample.tokens
            # At least a token for each: else the sample just preempted would come back at the same moment, forever.
            if num_running and context + max(self._margin, num_running + 1) > self._kv_tokens:
                return
            del self._waiting[sample.lease]
            self._add(sample)

    def _add(self, sample: _Sample) -> None:
        self._decoding_from += self._prefill_tokens(sample) * self._prefill_s
        sample.cached_tokens = 0  # if it is preempted, it is gone with the rest
        if sample.prefix is not None:
            self._prefixes[sample.prefix] = self._prefixes.get(sample.prefix, 0) + 1
        sample.order = self._num_admissions
        self._num_admissions += 1
        sample.origin = self._position - sample.tokens
        self._running[sample.lease] = sample
        self._context_at_zero += sample.prompt_tokens - sample.origin
        heappush(self._finishes, (sample.origin + sample.total_tokens, sample.order, sample))

    def _prefill_tokens(self, sample: _Sample) -> int:
        if sample.cached_tokens:
            return max(1, sample.prompt_tokens + sample.tokens - sample.cached_tokens)
        if sample.prefix is not None and sample.prefix in self._prefixes:
            return sample.tokens + 1
        return sample.prompt_tokens + sample.tokens

    def _remove(self, sample: _Sample, tokens: int) -> None:
        """Take a running sample out of the batch, at that many tokens."""
        del self._running[sample.lease]
        sample.order = -1
        self._decoded_by_departed += tokens - sample.tokens
        sample.tokens = tokens
        if sample.prefix is not None:
            self._prefixes[sample.prefix] -= 1
            if not self._prefixes[sample.prefix]:
                del self._prefixes[sample.prefix]
        if self._running:
            self._context_at_zero -= sample.prompt_tokens - sample.origin
        else:  # a fresh zero whenever the batch is empty: rounding does not pile up over a run
            self._position = self._context_at_zero = 0.0
            self._finishes.clear()

    def _first_to_finish(self) -> _Sample | None:
        finishes = self._finishes
        while finishes:
            _, order, sample = finishes[0]
            if sample.order == order:
                return sample
            heappop(finishes)
        return None

    def _find_next(self) -> None:
        self._next_is_known = True
        first = self._first_to_finish()
        if first is None:
            self._next_at = None
            return
        num_running = len(self._running)
        target = first.origin + first.total_tokens
        if num_running > 1:
            overflow = (self._kv_tokens - self._context_at_zero) / num_running
            if overflow + _SAME_POSITION < target:
                target = overflow
        num_steps = max(0.0, target - self._position)
        first_step_s, growth_s = self._step_time()
        self._next_position = max(self._position, target)
        self._next_at = self._decoding_from + num_steps * (first_step_s + 0.5 * growth_s * num_steps)

    def _step_time(self) -> tuple[Seconds, Seconds]:
        """Return the seconds of a step at the present position, and how much each further step adds."""
        num_running = len(self._running)
        context = self._context_at_zero + num_running * self._position
        return self._fixed_s + self._sample_s * num_running + self._context_s * context, self._context_s * num_running

    def _position_at(self, now: Seconds) -> float:
        elapsed = now - self._decoding_from
        if elapsed <= 0.0 or not self._running:
            return self._position
        step_s, growth_s = self._step_time()
        # The root in the form that is exact for growth_s == 0 and loses no digits near it.
        return self._position + 2.0 * elapsed / (step_s + sqrt(step_s * step_s + 2.0 * growth_s * elapsed))

    def _move_to(self, now: Seconds) -> None:
        self._position = self._position_at(now)
        self._decoding_from = max(self._decoding_from, now)

    @staticmethod
    def _tokens_of(sample: _Sample, position: float) -> int:
        return int(position - sample.origin + _WHOLE_TOKEN)
