"""Answers of a file, scored with a recipe's rewards: what `polyrl rewards` does, without the terminal.

A line is an object with `answer`, a text, and either `prompt`, the number of a prompt of the recipe's data, or `row`,
the columns of a row. A line of an episode has its `calls` instead of an answer, each with the texts `given` and
`drawn`, and the environment's `reward` and `parts`. `domain` names the domain if there are several. Answers to the same
prompt form a group, for functions of whole groups.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from polyrl.config.recipe import Recipe
from polyrl.data.prompts import Task, expected_of, to_task
from polyrl.data.rows import Row
from polyrl.errors import PolyrlError, UserError
from polyrl.not_data import NOT_DATA
from polyrl.rewards.groups import AnswerFacts, make_group
from polyrl.rewards.reward import CallText, Reward, RewardEpisode, RewardInput, needs_answer
from polyrl.run.tasks import RecipeTasks, load_tasks

MAX_ANSWERS = 200_000


class CallLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    given: str
    drawn: str
    finish: Literal["stop", "length"] = "stop"
    after: int | None = None
    """The number of the call that it goes on from, or -1; none: the one before it."""


class AnswerLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    answer: str | None = None
    calls: list[CallLine] | None = None
    """An episode's, in place of `answer`; `reward` and `parts` are its environment's."""
    reward: float | None = None
    parts: dict[str, float] = {}
    prompt: int | None = None
    row: dict[str, Any] | None = None
    domain: str = ""


class ScoredLine(NamedTuple):
    line: int
    """The number of the line in its file; the first is 1."""
    domain: str
    answer: str
    reward: Reward | None
    why: str
    """Why there is no reward."""


def read_answers(path: Path) -> list[tuple[int, AnswerLine]]:
    """Return the answers, each with the number of its line. Raises UserError, with file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    if len(lines) > MAX_ANSWERS:
        raise UserError(f"{path}: {len(lines):,} lines, expected at most {MAX_ANSWERS:,}")
    found = [(number, _read(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f'{path}: has no answers, expected lines such as {{"prompt": 0, "answer": "4"}}')
    return found


def _read(path: Path, number: int, line: bytes) -> AnswerLine:
    try:
        read = msgspec.json.decode(line, type=AnswerLine)
    except NOT_DATA as error:
        raise UserError(f"{path}:{number}: {error}") from error
    if (read.prompt is None) == (read.row is None):
        raise UserError(f"{path}:{number}: expected either `prompt`, a number, or `row`, the columns of a row")
    if (read.answer is None) == (read.calls is None):
        raise UserError(f"{path}:{number}: expected either `answer`, a text, or `calls`, those of an episode")
    if (read.calls is None) != (read.reward is None) or (read.calls is None and read.parts):
        raise UserError(f"{path}:{number}: expected `reward`, the environment's, with `calls`, and only there")
    for at, call in enumerate(read.calls or ()):
        if call.after is not None and not -1 <= call.after < at:
            raise UserError(f"{path}:{number}: calls.{at}.after: got {call.after}, expected an earlier call, or -1")
    return read


async def score_answers(recipe: Recipe, path: Path) -> list[ScoredLine]:
    """Score every answer of a file. Raises UserError for a file or a recipe that is wrong."""
    lines = read_answers(path)
    if not recipe.rewards.processes:  # reward workers are for runs: here is no manager that they could join
        recipe = replace(recipe, rewards=replace(recipe.rewards, processes=1))
    tasks = load_tasks(recipe)
    places = asyncio.Semaphore(recipe.rewards.max_under_way)
    try:
        inputs = [(number, *_input(recipe, tasks, path, number, one)) for number, one in lines]

        async def score(number: int, domain: int, given: RewardInput) -> ScoredLine:
            name = tasks.names[domain]
            async with places:
                try:
                    return ScoredLine(number, name, given.answer, await tasks.score_given(domain, given), "")
                except PolyrlError as error:
                    return ScoredLine(number, name, given.answer, None, str(error))

        scored = await asyncio.gather(*(score(*one) for one in inputs))
        if not tasks.scores_groups:
            return scored
        given = [(domain, one) for _, domain, one in inputs]

        async def with_group(group: list[int]) -> dict[int, ScoredLine]:
            async with places:
                return await _with_group(tasks, given, scored, group)

        with_groups = await asyncio.gather(*map(with_group, _groups(given, scored)))
        found = {at: one for each in with_groups for at, one in each.items()}
        return [found.get(at, one) for at, one in enumerate(scored)]
    finally:
        await tasks.close()


def _groups(given: Sequence[tuple[int, RewardInput]], scored: Sequence[ScoredLine]) -> list[list[int]]:
    """Return the places of answers that have a reward of their own, by prompt."""
    found: dict[tuple[int, str, str, bytes], list[int]] = {}
    for at, (domain, one) in enumerate(given):
        if scored[at].reward is not None:
            row = msgspec.json.encode(one.row, enc_hook=str, order="deterministic")  # has integers of any size
            found.setdefault((domain, one.prompt, one.expected, row), []).append(at)
    return list(found.values())


async def _with_group(
    tasks: RecipeTasks, given: Sequence[tuple[int, RewardInput]], scored: Sequence[ScoredLine], places: list[int]
) -> dict[int, ScoredLine]:
    """Return the lines of one group, by place, with what they are worth as a group."""
    domain, shared = given[places[0]]
    try:
        added = await tasks.score_given_group(domain, shared, [given[at][1] for at in places])
    except PolyrlError as error:
        return {at: scored[at]._replace(reward=None, why=str(error)) for at in places}
    return {at: _add(scored[at], one) for at, one in zip(places, added, strict=True)}


def _add(line: ScoredLine, added: Reward | None) -> ScoredLine:
    own = line.reward
    if own is None or added is None:
        return line._replace(reward=None, why=line.why or "infrastructure_failed, in a whole group")
    outcome = added.outcome if own.outcome == "scored" else own.outcome
    total = own._replace(score=own.score + added.score, parts={**own.parts, **added.parts}, outcome=outcome)
    return line._replace(reward=total)


def _input(recipe: Recipe, tasks: RecipeTasks, path: Path, number: int, line: AnswerLine) -> tuple[int, RewardInput]:
    if line.domain and line.domain not in tasks.names:
        raise UserError(f"{path}:{number}: domain: got {line.domain!r}, expected one of {', '.join(tasks.names)}")
    if not line.domain and len(tasks.names) > 1:
        raise UserError(f"{path}:{number}: domain: missing, expected one of {', '.join(tasks.names)}")
    domain = tasks.names.index(line.domain) if line.domain else 0
    section = recipe.data.all_domains[domain]
    if bool(section.environment) != (line.calls is not None):
        expected = "`calls`: it has episodes" if section.environment else "`answer`: it has no episodes"
        raise UserError(f"{path}:{number}: domain {tasks.names[domain]}: expected {expected}")
    task, written = _task(recipe, tasks, path, number, line, domain)
    shared = RewardInput(written, "", task.expected, task.fields, "stop", 0)
    return domain, make_group(shared, [_facts(tasks, line)]).answers[0]


def _task(
    recipe: Recipe, tasks: RecipeTasks, path: Path, number: int, line: AnswerLine, domain: int
) -> tuple[Task, str]:
    """Return the task of a line, and its prompt as the model sees it."""
    if line.prompt is not None:
        if not 0 <= line.prompt < tasks.num_prompts[domain]:
            last = tasks.num_prompts[domain] - 1
            raise UserError(f"{path}:{number}: prompt: got {line.prompt}, expected a number from 0 to {last}")
        return tasks.read(domain, line.prompt)
    section, row = recipe.data.all_domains[domain], Row(f"{path}:{number}", line.row or {})
    needed = needs_answer(recipe.rewards_of(section))
    if section.environment:
        return Task("", expected_of(row, section.answer_key, needs_answer=needed), row.fields), ""
    task = to_task(row, section, needs_answer=needed)
    return task, tasks.tokenizer.written(task.prompt, section.chat_template_kwargs or {})


def _facts(tasks: RecipeTasks, line: AnswerLine) -> AnswerFacts:
    if line.calls is None:
        answer = line.answer or ""
        return AnswerFacts(answer, "stop", len(tasks.tokenizer.tokens([answer])[0]) + 1)
    calls: list[CallText] = []
    for at, one in enumerate(line.calls):
        after = at - 1 if one.after is None else one.after
        calls.append(CallText(one.given, one.drawn, tasks.tool_calls(one.drawn), one.finish, after))
    num_tokens = sum(len(one) + 1 for one in tasks.tokenizer.tokens([call.drawn for call in calls]))
    last = calls[-1] if calls else CallText("", "")
    return AnswerFacts(last.drawn, last.finish, num_tokens, RewardEpisode(calls, line.reward or 0.0, line.parts))
