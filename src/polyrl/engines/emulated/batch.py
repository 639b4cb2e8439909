"""What runs in the emulated engine, what waits and what is preempted, at any moment. Time is passed in.

All that decode do so in lock step, so the batch keeps one position for all and each sample's distance from it.
"""

from collections import OrderedDict
from heapq import heappop, heappush
from math import inf

from polyrl.engines.emulated.text import EmulatedConfig, EmulatedEnd
from polyrl.ids import LeaseId, Seconds

_WHOLE_TOKEN = 1e-6
"""A token is whole when less than this is missing: positions carry rounding."""
_ADMISSION_MARGIN = 0.01
"""Share of the cache that admission leaves free, so that a newcomer is not thrown out at once."""


class EmulatedSample:
    """A job in the batch."""

    __slots__ = ("ending", "key", "lease", "order", "origin", "prompt_tokens", "tokens", "told")

    def __init__(self, lease: LeaseId, prompt_tokens: int, so_far: int, ending: EmulatedEnd, key: int = 0) -> None:
        self.lease = lease
        self.prompt_tokens = prompt_tokens
        self.tokens = so_far  # while it decodes: those it began with
        self.told = so_far
        self.ending = ending
        self.key = key
        self.origin = 0.0  # the position at which it had, or would have had, no token
        self.order = -1  # number of its latest turn at decoding; -1 while it does not

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.tokens


class Batch:
    """Who runs and how far everybody is. Moments are the emulated machine's, and must not go back.

    The position is how many steps were decoded since nobody did. A sample that decodes has `position - origin` tokens.
    """

    def __init__(self, config: EmulatedConfig) -> None:
        self._config = config
        self._capacity = config.kv_tokens if config.kv_tokens else inf
        self._waiting: OrderedDict[LeaseId, EmulatedSample] = OrderedDict()
        self._prefilling: OrderedDict[LeaseId, EmulatedSample] = OrderedDict()
        self._decoding: dict[LeaseId, EmulatedSample] = {}
        self._ended: dict[LeaseId, EmulatedSample] = {}
        self._finishes: list[
            tuple[float, int, EmulatedSample]
        ] = []  # a heap; entries of samples that left stay until popped
        self._now: Seconds = 0.0
        self._position = 0.0
        self._prefilling_since: Seconds = 0.0
        self._prefilling_context = 0
        self._context_at_zero = 0.0  # context of those that decode = this + their number * position
        self._num_turns = 0
        self.num_preemptions = 0

    def __contains__(self, lease: LeaseId) -> bool:
        places = (self._waiting, self._prefilling, self._decoding, self._ended)
        return any(lease in place for place in places)

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding or self._ended)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def context(self) -> float:
        """Tokens in the cache."""
        return self._prefilling_context + self._context_at_zero + len(self._decoding) * self._position

    def start(self, sample: EmulatedSample, now: Seconds) -> None:
        self.settle(now)
        self._waiting[sample.lease] = sample
        self._admit()

    def stop(self, lease: LeaseId, now: Seconds) -> None:
        """Forget a sample, if it is here."""
        self.settle(now)
        self._ended.pop(lease, None)
        self._waiting.pop(lease, None)
        running = self._decoding.get(lease, self._prefilling.get(lease))
        if running is not None:
            self._remove(running)
        self._admit()

    def take_news(self, now: Seconds) -> tuple[list[tuple[EmulatedSample, int]], list[EmulatedSample]]:
        """Samples that have more tokens than was told, with their number; and those that ended. Each is told once."""
        self.settle(now)
        ended, self._ended = list(self._ended.values()), {}
        reached = self._position + _WHOLE_TOKEN
        grown = [(sample, int(reached - sample.origin)) for sample in self._decoding.values()]
        grown += [(sample, sample.tokens) for sample in (*self._prefilling.values(), *self._waiting.values(), *ended)]
        return [(sample, tokens) for sample, tokens in grown if tokens > sample.told], ended

    def settle(self, now: Seconds) -> None:
        """Play everything that happens up to this moment."""
        while self._play_next(now):
            self._admit()
        self._move_to(now)

    def _play_next(self, until: Seconds) -> bool:
        first = self._first_to_finish()
        finished_at = inf if first is None else self._moment_of(first.origin + first.ending.num_tokens)
        prefilled_at = self._prefilled_at()
        full_at = self._full_at()
        at = min(finished_at, prefilled_at, full_at)
        if at > until:
            return False
        self._move_to(at)
        if first is not None and at == finished_at:
            self._finish(first)
        elif at == prefilled_at:
            self._begin_decoding()
        else:
            self._preempt_newest()
        return True

    def _first_to_finish(self) -> EmulatedSample | None:
        while self._finishes:
            _, order, sample = self._finishes[0]
            if sample.order == order:
                return sample
            heappop(self._finishes)
        return None

    def _prefilled_at(self) -> Seconds:
        for sample in self._prefilling.values():
            return self._prefilling_since + sample.context / self._config.prefill_tokens_per_s
        return inf

    def _full_at(self) -> Seconds:
        """When the cache overflows, if nothing else happens."""
        if self.num_running < 2 or not self._decoding or self._capacity == inf:
            return inf
        room = self._capacity - self._prefilling_context - self._context_at_zero
        return self._moment_of(room / len(self._decoding))

    def _step_s(self) -> Seconds:
        return 1.0 / self._config.tokens_per_s + self._config.step_per_sample_s * (len(self._decoding) - 1)

    def _moment_of(self, position: float) -> Seconds:
        return self._now + max(0.0, position - self._position) * self._step_s()

    def _move_to(self, now: Seconds) -> None:
        if self._decoding:
            self._position += max(0.0, now - self._now) / self._step_s()
        self._now = max(self._now, now)

    def _admit(self) -> None:
        """Let samples from the front of the queue run while they fit."""
        while self._waiting and self.num_running < self._config.slots:
            sample = next(iter(self._waiting.values()))
            # A token more for each: else the sample that was just thrown out would come back at the same moment.
            margin = max(_ADMISSION_MARGIN * self._config.kv_tokens, self.num_running + 1)
            if self.num_running and self.context + sample.context + margin > self._capacity:
                return
            del self._waiting[sample.lease]
            if not self._prefilling:
                self._prefilling_since = self._now
            self._prefilling[sample.lease] = sample
            self._prefilling_context += sample.context

    def _begin_decoding(self) -> None:
        sample = next(iter(self._prefilling.values()))
        self._remove(sample)
        self._num_turns += 1
        sample.order = self._num_turns
        sample.origin = self._position - sample.tokens
        self._decoding[sample.lease] = sample
        self._context_at_zero += sample.prompt_tokens - sample.origin
        heappush(self._finishes, (sample.origin + sample.ending.num_tokens, sample.order, sample))

    def _finish(self, sample: EmulatedSample) -> None:
        self._remove(sample)
        sample.tokens = sample.ending.num_tokens
        self._ended[sample.lease] = sample

    def _preempt_newest(self) -> None:
        newest = next(reversed(self._prefilling.values() if self._prefilling else self._decoding.values()))
        self._remove(newest)
        self._waiting[newest.lease] = newest
        self._waiting.move_to_end(newest.lease, last=False)
        self.num_preemptions += 1

    def _remove(self, sample: EmulatedSample) -> None:
        """Take a running sample out. A fraction of a token is lost."""
        if sample.order < 0:
            is_first = next(iter(self._prefilling)) == sample.lease
            del self._prefilling[sample.lease]
            self._prefilling_context -= sample.context
            self._prefilling_since = self._now if is_first else self._prefilling_since
            return
        del self._decoding[sample.lease]
        self._context_at_zero -= sample.prompt_tokens - sample.origin
        sample.tokens = int(self._position - sample.origin + _WHOLE_TOKEN)
        sample.order = -1
        if not self._decoding:  # a fresh zero, so that rounding does not pile up
            self._position = self._context_at_zero = 0.0
            self._finishes.clear()
