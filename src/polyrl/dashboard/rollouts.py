"""The answers of a run: lists of a step's samples, one sample token by token, one prompt across steps.

They are read from the files of trained steps, and from the manager's journal for the open round (run/kept_samples.py).

Rules kept here: files are only read. Lists carry the ends of texts; a whole text is decoded when one sample is asked
for. Decoded steps are kept, a bounded number of tokens.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyrl.dashboard.following import Follower, GroupPrompt
from polyrl.dashboard.rows import TaskRows
from polyrl.errors import UserError
from polyrl.journal.files import LIVE_FOLDER
from polyrl.run.kept_samples import Kept, KeptSample, KeptSpan, Texts, of_newest_step
from polyrl.trainer.batch import TrainSegment
from polyrl.trainer.state import entries

_TOKENS_AT_HAND = 2_000_000
"""The bound on tokens of decoded steps in memory, at about 70 bytes each. The last step asked for is always kept."""
_PREVIEW_TOKENS = 40
_MAX_STEPS_OF_PROMPT = 50
_MOST_SHOWN, _FEWEST_SHOWN = 30_000, 200
"""The most tokens of a sample that the page shows, and the least of each of its spans that are shown nevertheless."""
_LOOK_AGAIN_S = 5.0
_NOT_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_LONGEST_PIECE = 16
"""Tokens that one character may take."""


class SampleFilter(NamedTuple):
    """The filter of a list of samples, and its order."""

    task: str = ""
    outcome: str = ""
    """stop, length, trained, rejected or open."""
    worker: str = ""
    text: str = ""
    low: float | None = None
    high: float | None = None
    fewest: float | None = None
    """Tokens that the policy wrote."""
    most: float | None = None
    order: str = "group"
    """group, best, worst, longest, shortest, task, outcome or worker."""


class Rollouts:
    """The samples of a run's directory. Every method reads files: call it in a thread."""

    def __init__(self, run_dir: Path, text_of: Texts, follower: Follower, most_tokens: int = _TOKENS_AT_HAND) -> None:
        """`most_tokens`: the bound on tokens of decoded steps that are kept in memory."""
        self._most_tokens = most_tokens
        self._run_dir, self._text_of, self._follower = run_dir, text_of, follower
        self._rows = TaskRows(run_dir)
        self._lock = threading.Lock()
        self._kept: Kept | None = None
        self._read_at = 0.0
        self._steps: OrderedDict[int, list[KeptSample]] = OrderedDict()

    def steps(self) -> list[int]:
        """Return the trained steps, and those that are begun, whether or not they have answers yet."""
        kept = self._look()
        if kept is None or not kept.trained_steps:
            return [] if kept is None else kept.steps
        trained = kept.trained_steps
        return [*trained, *self._follower.steps_since(trained[-1])]

    def newest(self) -> list[KeptSample]:
        """Return the samples of the newest trained step; none before, or where its file was just moved."""
        try:
            return of_newest_step(self._run_dir)
        except OSError:
            return []

    def listed(self, step: int | None, wanted: SampleFilter, first: int, most: int) -> dict[str, Any]:
        """Return a page of a step's samples, by default of the newest. Raises UserError without that step."""
        steps = self.steps()
        if step is None:
            kept = self._look()
            trained = [] if kept is None else kept.trained_steps
            step = trained[-1] if trained else steps[-1] if steps else None
        if step is None:
            return {"step": None, "steps": [], "num": 0, "samples": [], "tasks": [], "workers": []}
        samples = self._of_step(step)
        found = self._in_order([one for one in samples if self._fits(one, wanted)], wanted.order)
        tasks = {planned.domain for one in samples if (planned := self._prompt_of(one)) is not None}
        workers = {segment.worker for one in samples for segment in one.segments if segment.worker}
        return {
            "step": step,
            "steps": [steps[0], steps[-1]],
            "num": len(found),
            "num_all": len(samples),
            "samples": [self._summary(one) for one in found[first:][:most]],
            "tasks": sorted(tasks),
            "workers": sorted(workers),
        }

    def one(self, step: int, name: str) -> dict[str, Any]:
        """Return a sample whole. Raises UserError."""
        samples = self._of_step(step)
        found = next((one for one in samples if one.name == name), None)
        if found is None:
            raise UserError(f"step {step} has no sample {name}")
        group, _, index = name.partition("/")
        num = sum(1 for one in samples if one.name.startswith(f"{group}/"))
        story = name if found.state == "open" else self._follower.sample_at(int(group), int(index), num)
        return {**self._summary(found), **self._texts(found), "story": story}

    def row(self, domain: int, prompt: int) -> dict[str, Any]:
        """Return the row of the data that a prompt was made of."""
        found = self._rows.of(domain, prompt)
        return {**found._asdict(), "fields": dict(found.fields)}

    def prompt(self, domain: int, prompt: int) -> list[dict[str, Any]]:
        """Return the samples of a prompt, of all steps that are kept, the newest first."""
        there = set(self.steps())
        by_step = self._follower.steps_of(domain, prompt)
        found: list[dict[str, Any]] = []
        for step in sorted(by_step.keys() & there, reverse=True)[:_MAX_STEPS_OF_PROMPT]:
            groups = {str(group) for group in by_step[step]}
            with contextlib.suppress(UserError):  # it is begun and has no answers yet, or was just removed
                found += [self._summary(one) for one in self._of_step(step) if one.name.partition("/")[0] in groups]
        return found

    # Reading

    def _look(self) -> Kept | None:
        """Return what the directory holds, looked at again every few seconds."""
        with self._lock:
            if self._kept is None or time.monotonic() - self._read_at > _LOOK_AGAIN_S:
                self._read_at = time.monotonic()
                try:
                    self._kept = None if self._is_empty() else Kept(self._run_dir, self._follower.steps_of_groups)
                except UserError:  # nothing was answered yet
                    self._kept = None
            return self._kept

    def _is_empty(self) -> bool:
        """Return whether there can be no answers: a simulation has none, and its journal is not read for them."""
        return not (self._run_dir / LIVE_FOLDER).is_dir() and not entries.of_run(self._run_dir)

    def _of_step(self, step: int) -> list[KeptSample]:
        kept = self._look()
        if kept is None:
            raise UserError("no answers are kept there")
        with self._lock:
            if step in self._steps:
                self._steps.move_to_end(step)
                return self._steps[step]
        samples = kept.of_step(step)
        if step in kept.trained_steps:
            with self._lock:
                self._steps[step] = samples
                while len(self._steps) > 1 and sum(map(_num_tokens, self._steps.values())) > self._most_tokens:
                    self._steps.popitem(last=False)
        return samples

    def _prompt_of(self, sample: KeptSample) -> GroupPrompt | None:
        return self._follower.prompt_of(int(sample.name.partition("/")[0]))

    def _fits(self, one: KeptSample, wanted: SampleFilter) -> bool:
        planned = self._prompt_of(one)
        return (
            (not wanted.task or (planned is not None and planned.domain == wanted.task))
            and (not wanted.outcome or wanted.outcome in (one.finish, one.state))
            and (not wanted.worker or any(segment.worker == wanted.worker for segment in one.segments))
            and (wanted.low is None or (one.reward is not None and one.reward >= wanted.low))
            and (wanted.high is None or (one.reward is not None and one.reward <= wanted.high))
            and (wanted.fewest is None or one.num_drawn >= wanted.fewest)
            and (wanted.most is None or one.num_drawn <= wanted.most)
            and (not wanted.text or any(wanted.text in self._text_of(tokens) for tokens in one.texts))
        )

    def _in_order(self, samples: list[KeptSample], order: str) -> list[KeptSample]:
        match order:
            case "best":
                return sorted(samples, key=lambda one: -(one.reward if one.reward is not None else float("-inf")))
            case "worst":
                return sorted(samples, key=lambda one: one.reward if one.reward is not None else float("inf"))
            case "longest":
                return sorted(samples, key=lambda one: -one.num_drawn)
            case "shortest":
                return sorted(samples, key=lambda one: one.num_drawn)
            case "task" | "outcome" | "worker":
                return sorted(samples, key=lambda one: self._sorted_under(one, order))
            case _:
                return samples

    def _sorted_under(self, one: KeptSample, order: str) -> str:
        """Return the word that a list in this order has above the sample."""
        match order:
            case "task":
                planned = self._prompt_of(one)
                return "" if planned is None else planned.domain
            case "outcome":
                return f"{one.finish}, {one.state}"
            case "worker":
                return ", ".join(_workers(one))
            case _:
                return ""

    # Showing

    def preview(self, one: KeptSample) -> str:
        """Return the beginning of an answer."""
        return self._text_of(one.answer[:_PREVIEW_TOKENS])

    def _summary(self, one: KeptSample) -> dict[str, Any]:
        """Return what a list shows of a sample."""
        planned = self._prompt_of(one)
        answer, prompt = one.answer, one.prompt
        is_long = len(answer) > 2 * _PREVIEW_TOKENS
        begin = self._text_of(answer[:_PREVIEW_TOKENS] if is_long else answer)
        return {
            "step": one.step,
            "name": one.name,
            "state": one.state,
            "reward": one.reward,
            "parts": one.parts,
            "tokens": one.num_drawn,
            "finish": one.finish,
            "task": "" if planned is None else planned.domain,
            "domain": None if planned is None else planned.domain_number,
            "prompt_number": None if planned is None else planned.prompt,
            "workers": _workers(one),
            "versions": sorted({segment.version for segment in one.segments}),
            "prompt_end": self._text_of(prompt[-_PREVIEW_TOKENS:]),
            "answer_begin": begin,
            "answer_end": self._text_of(answer[-_PREVIEW_TOKENS:]) if is_long else "",
            "is_episode": bool(one.sequences),
        }

    def _texts(self, one: KeptSample) -> dict[str, Any]:
        if one.sequences:
            spans_of = one.sequences
        else:
            answer = KeptSpan(True, one.answer, one.logprobs, _writers(one.segments))
            spans_of = ((KeptSpan(False, one.prompt), answer),)
        most = max(_FEWEST_SHOWN, _MOST_SHOWN // max(1, sum(map(len, spans_of))))
        sequences = [[part for span in spans for part in self._shown(span, most)] for spans in spans_of]
        segments = [
            {"version": segment.version, "worker": segment.worker, "engine": segment.engine} for segment in one.segments
        ]
        return {"sequences": sequences, "writers": segments}

    def _span(self, span: KeptSpan) -> dict[str, Any]:
        return {
            "drawn": span.drawn,
            "pieces": list(pieces(span.tokens, self._text_of)),
            "logprobs": [round(float(one), 4) for one in span.logprobs],
            "writers": list(span.writers),
        }

    def _shown(self, span: KeptSpan, most: int) -> list[dict[str, Any]]:
        """Return a span, of a long one its beginning and its end: a browser cannot hold millions of tokens."""
        left_out = len(span.tokens) - most
        if left_out <= 0:
            return [self._span(span)]
        half = most // 2
        ends = (slice(0, half), slice(len(span.tokens) - half, None))
        begin, end = (
            self._span(KeptSpan(span.drawn, span.tokens[part], span.logprobs[part], span.writers[part]))
            for part in ends
        )
        return [{**begin, "left_out": left_out}, end]


def _workers(one: KeptSample) -> list[str]:
    """Return the workers that wrote an answer, in the order of its text."""
    return list(dict.fromkeys(segment.worker or segment.engine for segment in one.segments))


def _num_tokens(samples: Sequence[KeptSample]) -> int:
    return sum(len(tokens) for one in samples for tokens in one.texts)


def _writers(segments: Sequence[TrainSegment]) -> list[int]:
    """Return, for each token, the place of its segment."""
    return [place for place, segment in enumerate(segments) for _ in range(segment.num_tokens)]


def pieces(tokens: Sequence[int], text_of: Texts) -> Iterator[str]:
    """Yield the text that each token adds; together they are the whole text.

    A tokenizer may need the token before to write a space, and several tokens for one character: the last of them
    brings it.
    """
    begin = whole = 0
    for place in range(len(tokens)):
        known, window = text_of(tokens[begin:whole]), text_of(tokens[begin : place + 1])
        is_whole = not window.endswith(_NOT_A_CHARACTER) or place - whole >= _LONGEST_PIECE
        if is_whole or place == len(tokens) - 1:
            yield window[len(known) :]
            begin, whole = whole, place + 1
        else:
            yield ""
