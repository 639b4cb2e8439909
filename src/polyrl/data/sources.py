"""A domain's prompts by number, as tokens: from a file, a user's own function, or the arithmetic task.

Rules kept here: rows are read, checked and tokenized at the start, so that an error in them is found before anything
runs. Rows whose prompt is too long are left out, and one log line counts them. Arithmetic problems are drawn on demand,
and drawn again if one is too long. A source may be used from any thread.
"""

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

import blake3
import numpy as np
from msgspec import json, structs

from polyrl.config.recipe import ARITHMETIC, HELD_OUT, DomainSection
from polyrl.data.arithmetic import NUM_TRAIN, NUM_VALIDATION, Problem, Split, draw_problem, draw_problems
from polyrl.data.prompts import NeedsAnswer, Task, expected_of, read_tasks, to_task
from polyrl.data.rows import DataError, Row, read_rows
from polyrl.data.tokens import ModelTokenizer, TokenIds

log = logging.getLogger("polyrl.data")

_BATCH_PROMPTS = 1000
_PROMPTS_AT_HAND = 4096
"""The number of problems kept in memory, enough for the rounds under way.

Any other is drawn again, with the same result.
"""


NUM_TASKS = 100_000
"""Tasks of an environment that makes one from any number."""


class Source(Protocol):
    @property
    def num_prompts(self) -> int: ...

    def task(self, prompt: int) -> Task: ...

    def written(self, prompt: int) -> str:
        """Return the prompt as the model sees it."""
        ...

    def tokens(self, prompt: int) -> TokenIds: ...

    def digest(self) -> str:
        """Return a digest of all prompts in their order; empty if the recipe alone determines them."""
        ...


class FileSource:
    def __init__(
        self,
        place: str,
        tasks: Iterable[Task],
        tokenizer: ModelTokenizer,
        max_tokens: int | None,
        enough: int | None = None,
        chat: Mapping[str, Any] | None = None,
    ) -> None:
        """Read and tokenize the tasks. Raises DataError, also if none can be used.

        Reading stops once `enough` prompts are found. `chat` holds further arguments of the chat template.
        """
        self._tokenizer, self._chat = tokenizer, {} if chat is None else chat
        self._tasks: list[Task] = []
        self._tokens: list[TokenIds] = []
        num_rows = 0
        remaining = iter(tasks)
        while batch := list(islice(remaining, _next_batch(len(self._tasks), enough))):
            for task, tokens in zip(batch, tokenizer.tokens([task.prompt for task in batch], self._chat), strict=True):
                num_rows += 1
                if _can_be_used(tokens, max_tokens):
                    self._tasks.append(task)
                    self._tokens.append(tokens)
        too_long = "no token" if max_tokens is None else f"no token, or more than {max_tokens}"
        if not self._tasks:
            found = f"none of its {num_rows} prompts can be used: {too_long}" if num_rows else "there is no row"
            raise DataError(f"{place}: {found}")
        if len(self._tasks) < num_rows and enough is None:
            log.warning("%s: %d of %d rows are left out: %s", place, num_rows - len(self._tasks), num_rows, too_long)

    @property
    def num_prompts(self) -> int:
        return len(self._tasks)

    def task(self, prompt: int) -> Task:
        return self._tasks[prompt]

    def written(self, prompt: int) -> str:
        return self._tokenizer.written(self._tasks[prompt].prompt, self._chat)

    def tokens(self, prompt: int) -> TokenIds:
        return self._tokens[prompt]

    def digest(self) -> str:
        hashing = blake3.blake3()
        for task in self._tasks:  # not the tokens: some chat templates write the day's date
            hashing.update(json.encode(task.prompt) + b"\n")
        return hashing.hexdigest()


class ArithmeticSource:
    def __init__(
        self,
        domain: DomainSection,
        tokenizer: ModelTokenizer,
        *,
        seed: int,
        split: Split,
        num_prompts: int,
        max_tokens: int | None,
    ) -> None:
        """Check that there are problems. Raises UserError if the task has none, or none that is short enough."""
        self._domain = structs.replace(domain, answer_key="answer")
        self._tokenizer, self._seed, self._num_prompts, self._max_tokens = tokenizer, seed, num_prompts, max_tokens
        self._split: Split = split
        self._draw = lru_cache(_PROMPTS_AT_HAND)(self._draw_anew)
        draw_problem(domain.arithmetic, seed, split, 0)
        self._draw(0)

    @property
    def num_prompts(self) -> int:
        return self._num_prompts

    def task(self, prompt: int) -> Task:
        return self._task(prompt, self._draw(prompt)[0])

    def written(self, prompt: int) -> str:
        return self._tokenizer.written(self.task(prompt).prompt, self._domain.chat_template_kwargs)

    def tokens(self, prompt: int) -> TokenIds:
        return self._draw(prompt)[1]

    def digest(self) -> str:
        return ""

    def _draw_anew(self, prompt: int) -> tuple[Problem, TokenIds]:
        for problem in draw_problems(self._domain.arithmetic, self._seed, self._split, prompt):
            written = self._task(prompt, problem).prompt
            (tokens,) = self._tokenizer.tokens([written], self._domain.chat_template_kwargs)
            if _can_be_used(tokens, self._max_tokens):
                return problem, tokens
        raise DataError(f"{ARITHMETIC}: no problem was found with at most {self._max_tokens} tokens")

    def _task(self, prompt: int, problem: Problem) -> Task:
        fields = {
            "prompt": problem.prompt,
            "sum": problem.as_written,
            "answer": problem.answer,
            "terms": list(problem.terms),
        }
        return to_task(Row(f"problem {prompt}", fields), self._domain, needs_answer=True)


class EnvironmentSource:
    """The tasks of an environment: rows of the recipe's data, or a number of tasks that the environment brings."""

    def __init__(
        self,
        num_tasks: int,
        rows: Iterable[Row] | None = None,
        first: int = 0,
        *,
        answer_key: str = "answer",
        needs_answer: NeedsAnswer = False,
    ) -> None:
        """`first` is the number of its first task, among those of the environment. Raises DataError for a row without
        an answer, where functions need one."""
        self.first = first
        read = None if rows is None else list(rows)
        self._rows = None if read is None else [json.encode(row.fields) for row in read]
        self._expected = [expected_of(row, answer_key, needs_answer=needs_answer) for row in read or ()]
        self._num_tasks = num_tasks if self._rows is None else len(self._rows)

    @property
    def num_prompts(self) -> int:
        return self._num_tasks

    def row(self, prompt: int) -> bytes:
        """Return a task's row, as JSON; empty where the environment brings its tasks."""
        return b"" if self._rows is None else self._rows[prompt]

    def task(self, prompt: int) -> Task:
        if self._rows is None:
            return Task("", "", {})
        return Task("", self._expected[prompt], json.decode(self._rows[prompt]))

    def written(self, prompt: int) -> str:
        return f"task {prompt} of an environment, which writes its prompts"

    def tokens(self, prompt: int) -> TokenIds:
        return np.zeros(0, np.int32)

    def digest(self) -> str:
        return "" if self._rows is None else blake3.blake3(b"\n".join(self._rows)).hexdigest()


def _next_batch(found: int, enough: int | None) -> int:
    return _BATCH_PROMPTS if enough is None else min(_BATCH_PROMPTS, enough - found)


def _can_be_used(prompt: TokenIds, max_tokens: int | None) -> bool:
    return len(prompt) > 0 and (max_tokens is None or len(prompt) <= max_tokens)


def open_training(
    domain: DomainSection,
    tokenizer: ModelTokenizer,
    *,
    seed: int,
    max_tokens: int | None,
    needs_answer: NeedsAnswer,
    key: str,
    enough: int | None = None,
) -> Source:
    """Open the prompts that a domain trains on.

    `max_tokens` limits the length of a prompt; None: no limit. `key` names the domain's settings. Reading a file stops
    once `enough` prompts are found; None: all of it is read.
    """
    if domain.environment:
        rows = read_rows(domain.source, domain.num_prompts, domain.source_args, key) if domain.source else None
        return EnvironmentSource(
            domain.num_prompts or NUM_TASKS, rows, answer_key=domain.answer_key, needs_answer=needs_answer
        )
    assert domain.source is not None
    if domain.source == ARITHMETIC:
        num_prompts = NUM_TRAIN if domain.num_prompts is None else domain.num_prompts
        return ArithmeticSource(
            domain, tokenizer, seed=seed, split="train", num_prompts=num_prompts, max_tokens=max_tokens
        )
    tasks = read_tasks(domain.source, domain, needs_answer=needs_answer, key=key)
    return FileSource(domain.source, tasks, tokenizer, max_tokens, enough, domain.chat_template_kwargs)


def open_validation(
    place: str,
    domain: DomainSection,
    tokenizer: ModelTokenizer,
    *,
    num_prompts: int,
    max_tokens: int | None,
    needs_answer: NeedsAnswer,
    key: str,
) -> Source:
    """Open a set that a domain is validated on: the first `num_prompts`, the same in every run."""
    if domain.environment:
        if place == HELD_OUT:
            trained = 0 if domain.validation_args else domain.num_prompts or NUM_TASKS
            return EnvironmentSource(num_prompts, first=trained)
        rows = read_rows(place, num_prompts, domain.validation_args, key)
        return EnvironmentSource(0, rows, answer_key=domain.answer_key, needs_answer=needs_answer)
    if place == ARITHMETIC:
        num_prompts = min(num_prompts, NUM_VALIDATION)
        return ArithmeticSource(
            domain, tokenizer, seed=0, split="validation", num_prompts=num_prompts, max_tokens=max_tokens
        )
    first = structs.replace(domain, num_prompts=num_prompts)
    tasks = read_tasks(place, first, needs_answer=needs_answer, key=key, validates=True)
    return FileSource(place, tasks, tokenizer, max_tokens, chat=domain.chat_template_kwargs)
