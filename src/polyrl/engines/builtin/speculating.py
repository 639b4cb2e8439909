"""Speculation: rounds that verify drafts, in bursts between two looks of the engine, as plain decoding has them.

A sample's token is a function of the model's logits, its seed and its position. So each row of a round draws the very
token that decoding would draw there, and a draft token stands if it is that token: answers are the same with and
without drafts, as far as the runner's results are, and so are their log-probabilities.

The keys and values of rows behind the first wrong draft token stay in the cache until the tokens that belong there
overwrite them; no row reads beyond its own position, and no block is shared before all of it is computed.

The engine calls `follow`, `should_begin`, `decoded` and `ended` between steps, and `run` on its thread, during which it
calls nothing else: that is why nothing here has a lock.
"""

import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

from polyrl.engines.builtin.batching import Chunk
from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.engines.builtin.drafting import NOTHING, Draft, Drafts, accepted
from polyrl.engines.builtin.gate import MAX_SAMPLES, Gate
from polyrl.engines.builtin.steps import Drafted, Drawn, DrawRule, OnDrawn, StepRunner
from polyrl.engines.engine import Speculated
from polyrl.ids import LeaseId

BURST_TOKENS = 64
"""Tokens of a sample that a burst may bring: so many blocks are reserved."""
_BURST_S = 0.1
_NUM_WATCHED = 8
"""Samples whose drafts are compared with what is decoded, where nothing is verified."""


class _Line:
    """A sample during a burst."""

    __slots__ = ("blocks", "drawn", "ending_ids", "lease", "left", "newest", "rule", "start")

    def __init__(self, chunk: Chunk, rule: DrawRule) -> None:
        member: Any = chunk.member
        self.lease: LeaseId = member.lease
        self.blocks = tuple(member.blocks)
        self.newest: int = member.tokens[chunk.start]
        self.start = chunk.start
        self.rule = rule
        self.left: int = member.max_total - len(member.tokens)
        self.ending_ids: frozenset[int] = member.data.ending.ids
        self.drawn = Drawn([], [])

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.drawn.tokens.extend(tokens)
        self.drawn.logprobs.extend(logprobs)
        self.newest = tokens[-1]
        self.start += len(tokens)
        self.rule = self.rule._replace(position=self.rule.position + len(tokens))
        self.left -= len(tokens)

    def is_over(self, new: Sequence[int]) -> bool:
        return self.left <= 0 or not self.ending_ids.isdisjoint(new)


class Speculation:
    def __init__(self, max_draft: int, *, always: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self.counts = Speculated()
        self._gate = Gate(max_draft, always=always)
        self._drafts = Drafts()
        self._clock = clock
        self._watched: list[tuple[LeaseId, Draft]] = []

    @staticmethod
    def find(config: BuiltinConfig, *, is_invariant: bool) -> "Speculation | None":
        """None: it is off. So it is where a GPU is to be batch-invariant: rows of a draft come from other kernels than
        those that decode, and would not have the same bits."""
        if config.speculation == "off" or is_invariant:
            return None
        return Speculation(config.draft_tokens, always=config.speculation == "always")

    # Between steps

    def ended(self, member: Any) -> None:
        """Keep a sample that ended by itself: it may hint at others."""
        self._drafts.remember(member.lease, member.data.job.prompt, member.tokens)

    def should_begin(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether the next burst should verify drafts. If not, drafts are compared with what it decodes.

        All chunks decode.
        """
        self._watched = []
        if len(chunks) > MAX_SAMPLES:
            return False
        begins = self._gate.should_begin(len(chunks))
        if not begins and not self._gate.may_watch():
            return False
        began = self._clock()
        members: list[Any] = [chunk.member for chunk in chunks]
        self._drafts.follow((one.lease, one.data.job.prompt, one.tokens) for one in members)
        if begins:
            self._gate.prepared(self._clock() - began)
            return True
        most = self._gate.max_draft
        self._watched = [(one.lease, self._drafts.draft(one.lease, most)) for one in members[:_NUM_WATCHED]]
        self._gate.watched(self._clock() - began)
        return False

    def timed(self, chunks: Sequence[Chunk], run_burst: Callable[..., list[Drawn]]) -> Callable[..., list[Drawn]]:
        """Time a burst without drafts, on the thread that runs it."""

        def run(look: OnDrawn | None = None) -> list[Drawn]:
            seen: list[Drawn] = []

            def see(drawn: list[Drawn]) -> None:
                seen.extend(drawn)
                if look is not None:
                    look(drawn)

            began = self._clock()
            drawn = run_burst(*(() if look is None else (see,)))
            self.decoded(chunks, [*seen, *drawn], self._clock() - began)
            return drawn

        return run

    def decoded(self, chunks: Sequence[Chunk], drawn: Sequence[Drawn], seconds: float) -> None:
        """Count a burst of steps without drafts."""
        if not drawn or len(chunks) > MAX_SAMPLES:
            return
        self._gate.decoded(len(chunks), len(drawn), seconds)
        row_of = {chunk.member.lease: row for row, chunk in enumerate(chunks)}
        for lease, draft in self._watched:
            tokens = [one.tokens[row_of[lease]] for one in drawn[: len(draft.tokens)]]
            self._gate.saw(
                draft._replace(tokens=draft.tokens[: len(tokens)]), accepted(draft.tokens[: len(tokens)], tokens)
            )
        self._watched = []

    # On the engine's thread

    def run(
        self, runner: StepRunner, chunks: Sequence[Chunk], wanted: Sequence[DrawRule], num_tokens: int, ends: Event
    ) -> list[Drawn]:
        """Run rounds until one sample ends, `num_tokens` are drawn of one, it no longer pays, or `ends` is set.

        Returns an entry for each sample. All chunks decode, and have blocks for `num_tokens` more.
        """
        lines = [_Line(chunk, rule) for chunk, rule in zip(chunks, wanted, strict=True)]
        until = self._clock() + _BURST_S
        while True:
            is_over = self._run_round(runner, lines, num_tokens)
            if is_over or ends.is_set() or self._clock() > until or not self._gate.should_go_on(len(lines)):
                return [line.drawn for line in lines]

    def _run_round(self, runner: StepRunner, lines: list[_Line], num_tokens: int) -> bool:
        """Returns whether the burst must end."""
        began = self._clock()
        most = self._gate.max_draft
        drafts = [
            self._drafts.draft(one.lease, min(most, one.left - 1, num_tokens - 1 - len(one.drawn.tokens)))
            for one in lines
        ]
        rows = self._gate.rows(drafts)
        began += runner.prepare_rows(len(lines), rows)
        drafts = [one._replace(tokens=one.tokens[: rows - 1]) if one.tokens else NOTHING for one in drafts]
        found = runner.verify(
            [
                Drafted([line.newest, *draft.tokens], line.start, line.blocks, line.rule)
                for line, draft in zip(lines, drafts, strict=True)
            ],
            rows,
        )
        num_drafted = num_accepted = 0
        is_over = False
        for line, draft, drawn in zip(lines, drafts, found, strict=True):
            num_right = accepted(draft.tokens, drawn.tokens)
            self._gate.saw(draft, num_right)
            tokens = drawn.tokens[: num_right + 1]
            line.add(tokens, drawn.logprobs[: num_right + 1])
            self._drafts.extend(line.lease, tokens)
            is_over |= line.is_over(tokens) or len(line.drawn.tokens) >= num_tokens
            num_drafted += len(draft.tokens)
            num_accepted += num_right
        self._gate.verified(len(lines), rows, len(lines) + num_accepted, self._clock() - began)
        rounds, all_drafted, all_accepted = self.counts
        self.counts = Speculated(rounds + 1, all_drafted + num_drafted, all_accepted + num_accepted)
        return is_over
