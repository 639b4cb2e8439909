"""The answers of a run that its directory holds: those that steps were trained on, and those of the open round.

    RUN/samples, RUN/checkpoints/redo   what steps were trained on, and what taught nothing (trainer/state/entries.py)
    RUN/journal                         what the manager keeps of rounds: prompts, tokens, rewards

Rules kept here: files are only read, also while a run writes them: a record that is cut short counts as not yet
written. A group in a step's file is not read from the journal as well. No process is asked, so a run that is over can
be read in the same way.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from polyrl.config import load_toml
from polyrl.data.tokens import answer_decoder, check_tokenizer
from polyrl.errors import JournalError, UserError, one_line
from polyrl.ids import GroupId, SampleId, group_of, show_sample
from polyrl.journal.files import find_begun, open_journal
from polyrl.journal.framing import CutShort
from polyrl.journal.records import resume_scheduler
from polyrl.manager.journal import read_payload
from polyrl.manager.notes import EpisodeKept, RewardKept
from polyrl.manager.payload import Payload
from polyrl.manager.payload_reader import PayloadReader
from polyrl.run.conversations import calls_of
from polyrl.scheduling.core import commands as c
from polyrl.trainer.batch import TrainGroup, TrainSample, TrainSegment, number_episodes
from polyrl.trainer.sequences import make_sequences
from polyrl.trainer.state import entries
from polyrl.wire import columns

KeptState = Literal["trained", "rejected", "open"]
Texts = Callable[[Sequence[int]], str]
"""From tokens to text."""


def recipe_of(run_dir: Path) -> dict[str, Any]:
    """Return the recipe that a run was started with; empty if it has none. Raises ConfigError."""
    file = run_dir / "recipe.toml"
    return load_toml(file) if file.is_file() else {}


def text_decoder(run_dir: Path, folder: str | None = None) -> Texts:
    """Return a decoder, of `folder` or else the run's recipe; without either it shows tokens as numbers.

    The tokenizer is loaded when a first text is asked for: it may take seconds, and a run can be looked at without.
    The decoder raises UserError for a directory without a tokenizer; of `folder`, so does this.
    """
    if folder is not None:
        check_tokenizer(folder, "--tokenizer")
    else:
        folder = recipe_of(run_dir).get("model", {}).get("path")
    if folder is None:
        return lambda tokens: " ".join(map(str, tokens))
    lock, loaded, path = threading.Lock(), list[Texts](), folder

    def text_of(tokens: Sequence[int]) -> str:
        with lock:
            if not loaded:
                loaded.append(answer_decoder(path))
        return loaded[0](tokens)

    return text_of


class KeptSpan(NamedTuple):
    """Consecutive tokens of an episode that the policy drew, or that it was given."""

    drawn: bool
    tokens: Sequence[int]
    logprobs: Sequence[float] = ()
    """The log-probabilities that drawn tokens were drawn with."""
    writers: Sequence[int] = ()
    """For each drawn token, the place of its segment in the sample's `segments`."""


class KeptSample(NamedTuple):
    step: int
    name: str
    """GROUP/INDEX; of a trained step, the index counts those that came."""
    state: KeptState
    """`rejected`: its group taught nothing; `open`: its step is not trained yet."""
    prompt: Sequence[int]
    answer: Sequence[int]
    """Of an episode, with the tokens that its environment gave in between."""
    reward: float | None
    """None: it is not scored yet."""
    parts: dict[str, float]
    finish: str
    segments: tuple[TrainSegment, ...]
    num_drawn: int
    sequences: tuple[tuple[KeptSpan, ...], ...] = ()
    """The training sequences of an episode; empty: `answer` was drawn in one piece. `prompt` and `answer` are the first
    sequence's."""
    logprobs: Sequence[float] = ()
    """Of an answer that was drawn in one piece: the log-probabilities that its tokens were drawn with."""

    @property
    def texts(self) -> list[Sequence[int]]:
        """All that can be looked through."""
        return [self.prompt, self.answer, *(span.tokens for one in self.sequences[1:] for span in one)]


class NoLongerKept(UserError):
    """A step's file was removed after it was listed."""


class Kept:
    """The samples of a run. Raises UserError for a directory without any."""

    def __init__(self, run_dir: Path, steps_of_groups: Callable[[], Mapping[GroupId, int]] | None = None) -> None:
        """`steps_of_groups` gives the step of each group; None: the newest journal is read for it."""
        self._run_dir, self._steps_of_groups = run_dir, steps_of_groups
        self._files = entries.of_run(run_dir)
        if not self._files and not self._open:
            raise UserError(f"{run_dir}: no samples there; expected the directory of a run that has answered something")

    @cached_property
    def _open(self) -> dict[int, list[KeptSample]]:
        """The answers of the open round. The manager's journal, which may be large, is read for them alone."""
        try:
            step_of = _steps_of_groups(self._run_dir) if self._steps_of_groups is None else self._steps_of_groups()
        except JournalError:
            return {}
        untrained = {group: step for group, step in step_of.items() if step > max(self._files, default=-1)}
        return _open_samples(self._run_dir, untrained) if untrained else {}

    @property
    def steps(self) -> list[int]:
        """All steps. The journal is read for those that are not trained yet."""
        return sorted({*self._files, *self._open})

    @property
    def trained_steps(self) -> list[int]:
        return list(self._files)

    def of_step(self, step: int) -> list[KeptSample]:
        """Raises UserError for a step that is not there."""
        if step in self._files:
            return _samples_of(step, self._read(step))
        if step not in self._open:
            first, last = self.steps[0], self.steps[-1]
            raise UserError(f"step {step} is not kept; expected one from {first} to {last}")
        return self._open[step]

    def choose(
        self, text_of: Texts, *, step: int | None, grep: str | None, order: Literal["best", "worst"] | None
    ) -> Iterator[KeptSample]:
        """Choose samples of a step, by default of the newest that was trained; with `grep`, of all steps, the newest
        first.

        `grep`: only those whose prompt or answer has this text. `order`: by reward, and only those that have one.
        """
        newest = self.trained_steps[-1:] or self.steps[-1:]
        for one in [step] if step is not None else newest if grep is None else self.steps[::-1]:
            try:
                samples = self.of_step(one)
            except NoLongerKept:
                if grep is None:
                    raise
                continue
            if grep is not None:
                samples = [kept for kept in samples if any(grep in text_of(one) for one in kept.texts)]
            if order is not None:
                scored = [kept for kept in samples if kept.reward is not None]
                samples = sorted(scored, key=lambda kept: kept.reward or 0.0, reverse=order == "best")
            yield from samples

    def _read(self, step: int) -> entries.Entry:
        """Read a step's entry. A run that goes on moves a step's file, or removes it, also after it was listed. Raises
        UserError."""
        for path in (self._files[step], entries.of_run(self._run_dir).get(step)):
            if path is None:
                break
            try:
                return entries.read(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        raise NoLongerKept(f"step {step} is no longer kept: the run has just removed it")


def of_trained_step(run_dir: Path, step: int) -> list[KeptSample]:
    """Return what a step was trained on; nothing if its file is not there. The journal is not read. Raises OSError."""
    path = entries.of_run(run_dir).get(step)
    return [] if path is None else _samples_of(step, entries.read(path))


def of_newest_step(run_dir: Path) -> list[KeptSample]:
    """Return what the newest trained step was trained on; nothing before. Raises OSError."""
    return of_trained_step(run_dir, max(entries.of_run(run_dir), default=-1))


def _samples_of(step: int, entry: entries.Entry) -> list[KeptSample]:
    num_trained = sum(len(entries.decode_groups(batch)) for batch in entry.batches)
    return [
        _of_entry(step, episode, index, "trained" if place < num_trained else "rejected")
        for place, group in enumerate(entry.groups())
        for index, episode in enumerate(_episodes(group))
    ]


def _episodes(group: TrainGroup) -> list[list[TrainSample]]:
    """Return the sequences of a group by episode."""
    found: dict[int, list[TrainSample]] = {}
    for one, number in zip(group, number_episodes([group])[0], strict=True):
        found.setdefault(number, []).append(one)
    return list(found.values())


def _of_entry(step: int, episode: list[TrainSample], index: int, state: KeptState) -> KeptSample:
    sample = episode[0]
    is_one_answer = len(episode) == 1 and sample.drawn is None
    segments = tuple(dict.fromkeys(segment for one in episode for segment in one.written_by))
    return KeptSample(
        step, f"{sample.group}/{index}", state, sample.prompt.tolist(), sample.answer.tolist(), sample.reward,
        dict(sample.parts), sample.finish, sample.written_by if is_one_answer else segments,
        sum(one.num_drawn for one in episode),
        () if is_one_answer else tuple(_spans_of_entry(one, segments) for one in episode),
        sample.logprobs.tolist() if is_one_answer else (),
    )  # fmt: skip


def _spans_of_entry(sample: TrainSample, segments: Sequence[TrainSegment]) -> tuple[KeptSpan, ...]:
    num_prompt = len(sample.prompt)
    positions = range(len(sample.answer)) if sample.drawn is None else sample.drawn.tolist()
    drawn = [num_prompt + one for one in positions]
    writers = [segments.index(segment) for segment in sample.written_by for _ in range(segment.num_tokens)]
    return _spans([*sample.prompt.tolist(), *sample.answer.tolist()], drawn, sample.logprobs.tolist(), writers)


def _spans(
    tokens: Sequence[int], drawn: Sequence[int], logprobs: Sequence[float] = (), writers: Sequence[int] = ()
) -> tuple[KeptSpan, ...]:
    """Return the tokens in pieces, given and drawn ones alternating. `drawn`: the positions of the drawn ones."""
    is_drawn = np.zeros(len(tokens), bool)
    is_drawn[list(drawn)] = True
    starts = [0, *(np.flatnonzero(np.diff(is_drawn)) + 1).tolist(), len(tokens)]
    num_before = np.concatenate([[0], np.cumsum(is_drawn)])
    found: list[KeptSpan] = []
    for one, end in pairwise(starts):
        part = slice(num_before[one], num_before[end])
        found.append(KeptSpan(bool(is_drawn[one]), tokens[one:end], logprobs[part], writers[part]))
    return tuple(found)


def _open_samples(run_dir: Path, step_of: Mapping[GroupId, int]) -> dict[int, list[KeptSample]]:
    """Answers of these groups in the manager's journal, by step: whole ones alone. Raises JournalError."""
    try:
        return _whole_samples(run_dir, step_of)
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise JournalError(f"{run_dir}: its payload is none that a manager writes: {one_line(error)}") from error


def _whole_samples(run_dir: Path, step_of: Mapping[GroupId, int]) -> dict[int, list[KeptSample]]:
    reader, scored = PayloadReader(step_of), set[int]()
    for item in read_payload(run_dir):
        if isinstance(item, list):
            reader.tokens(item)
        else:
            reader.note(item)
        if isinstance(item, RewardKept | EpisodeKept):
            scored.add(item.sample)
    payload = reader.finish(None)
    found: dict[int, list[KeptSample]] = {}
    for sample in sorted(payload.tokens):
        step = step_of[group_of(sample)]
        written = payload.tokens[sample]
        if written.finish and (not written.calls or sample in scored):  # calls before an episode's last have ended too
            found.setdefault(step, []).append(_of_journal(step, sample, payload, is_scored=sample in scored))
    return found


def _of_journal(step: int, sample: SampleId, payload: Payload, *, is_scored: bool) -> KeptSample:
    written = payload.tokens[sample]
    prompt = payload.prompts.get(group_of(sample))
    ends = [one.from_token for one in written.segments[1:]] + [written.num_tokens]
    segments = tuple(
        TrainSegment(one.version, end - one.from_token, one.engine, one.worker)
        for one, end in zip(written.segments, ends, strict=True)
    )
    if not all(map(math.isfinite, (written.reward, *written.parts.values()))):
        raise ValueError("a reward that is no finite number")
    tokens, reward = columns.view_cells(written.cells)["token"], written.reward if is_scored else None
    sequences = make_sequences(calls_of(written.calls, written.cells), tokens.astype(np.int32))
    spans = tuple(_spans(one.tokens.tolist(), one.trained.tolist()) for one in sequences)
    if spans:
        given = spans[0][0].tokens
        answer = [token for span in spans[0][1:] for token in span.tokens]
    else:
        given, answer = () if prompt is None else columns.unpack_tokens(prompt.tokens), tokens.tolist()
    return KeptSample(
        step, show_sample(sample), "open", given, answer, reward, written.parts, written.finish, segments,
        len(tokens), spans, () if spans else columns.view_cells(written.cells)["logprob"].tolist(),
    )  # fmt: skip


def _steps_of_groups(run_dir: Path) -> dict[GroupId, int]:
    """Return the step of each group in the newest journal file."""
    header, records = open_journal(find_begun(run_dir)[-1])
    scheduler = resume_scheduler(header, None)
    found: dict[GroupId, int] = {group.id: group.step for group in scheduler.desk.groups.values()}
    try:
        for record in records:
            for command in scheduler.handle(record.event, record.now):
                found |= dict(_opened(command))
    except CutShort:  # it is being written
        pass
    return found


def _opened(command: c.Command) -> Iterator[tuple[GroupId, int]]:
    match command:
        case c.OpenRound():
            yield from ((group.group, command.step) for group in command.groups)
        case c.AddGroup():
            yield command.group.group, command.step
        case _:
            return
