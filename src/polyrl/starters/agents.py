"""Small models for environments, to start reinforcement learning from. About a minute on one core each.

A model learns how an episode looks from a player that knows the rules and plays badly: calls the calculator now and
then, mistypes, guesses; walks left and right without listening. It answers in the environment's format, and most of
its answers earn nothing. To earn more is what reinforcement learning then has to find.

Rules kept here: the environment itself says what is given, so that a lesson looks like an episode of a run.
Left out: reinforcement learning, and lessons as such (teaching.py).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from polyrl.data import characters
from polyrl.hosts.own import Turn
from polyrl.starters import frozenlake, teaching
from polyrl.starters.environments import Calculator, Treasure
from polyrl.starters.teaching import Demonstration, Show

_CALLS = 0.25
"""The share of sums for which the teacher calls the calculator."""
_COPIES = 0.85
"""The probability that the teacher copies a number as it is."""
_WORST_GUESS = 9
_LISTENS = 0.3
"""The share of moves before which the teacher of the treasure listens."""
_LESSON_SEED = 1_000_003
"""Lessons are other tasks than those of a run, whose seeds are small."""


class TaughtEnvironment(Protocol):
    def begin(self, task: dict[str, Any], seed: int) -> str | list[dict[str, str]]: ...
    def step(self, text: str) -> Turn: ...


Teacher = Callable[[list[str], random.Random], str]
"""(what was said so far, given and drawn in turn; draws) -> the next answer."""


class AgentStarter(NamedTuple):
    make: Callable[[], TaughtEnvironment]
    teacher: Teacher
    num_steps: int
    vocabulary: Sequence[str] = characters.VOCABULARY
    encode: Callable[[str], list[int]] = characters.encode
    save_tokenizer: Callable[[Path], None] = characters.save_tokenizer


def play(starter: AgentStarter, index: int, draws: random.Random) -> Demonstration:
    """Return an episode that the teacher played."""
    environment = starter.make()
    tokens: list[int] = []
    drawn: list[bool] = []
    said = [_text(environment.begin({"index": index}, _LESSON_SEED))]
    while True:
        given = starter.encode(said[-1])
        said.append(starter.teacher(said, draws))
        answer = [*starter.encode(said[-1]), characters.END_ID]
        tokens += [*given, *answer]
        drawn += [False] * len(given) + [True] * len(answer)
        turn = environment.step(said[-1])
        if turn.done:
            return Demonstration(tokens, drawn)
        said.append(_text(turn.messages))


def _text(said: str | Sequence[dict[str, Any]]) -> str:
    return said if isinstance(said, str) else "".join(one["content"] for one in said)


def teach_calculator(said: list[str], draws: random.Random) -> str:
    """Teach answers to `12p7q`: mostly a guess, now and then a call `c12p7`, whose result `19a` is mostly copied."""
    if len(said) > 1:
        return _copied(said[-1].removesuffix("a"), draws)
    first, _, second = said[0].removesuffix("q").partition("p")
    if draws.random() < _CALLS:
        return f"c{_copied(first, draws)}p{_copied(second, draws)}"
    return str(max(1, int(first) + int(second) + draws.randint(-_WORST_GUESS, _WORST_GUESS)))


def _copied(number: str, draws: random.Random) -> str:
    if draws.random() < _COPIES:
        return number
    return str(max(1, int(number) + draws.randint(-_WORST_GUESS, _WORST_GUESS)))


def teach_treasure(said: list[str], draws: random.Random) -> str:
    """Left or right: now and then the way that `w`armer or `c`older points to, and mostly any."""
    if len(said) == 1 or draws.random() >= _LISTENS:
        return draws.choice("lr")
    before, heard = said[-2:]
    return before if heard == "w" else "lr".replace(before, "")


STARTERS: Mapping[str, AgentStarter] = {
    "calculator": AgentStarter(lambda: Calculator(style="letters"), teach_calculator, 1700),
    "treasure": AgentStarter(lambda: Treasure(style="letters"), teach_treasure, 400),
    "frozenlake": AgentStarter(
        frozenlake.make, frozenlake.teach, 1200, frozenlake.VOCABULARY, frozenlake.encode, frozenlake.save_tokenizer
    ),
}


def make_model(name: str, folder: Path, *, seed: int, num_steps: int | None = None, show: Show | None = None) -> None:
    """Make a model for an environment of STARTERS. Raises UserError if it cannot be written."""
    starter = STARTERS[name]

    def demonstrate(number: int, _: float, draws: random.Random) -> Demonstration:
        return play(starter, number, draws)

    teaching.make_model(
        folder,
        demonstrate,
        seed=seed,
        num_steps=starter.num_steps if num_steps is None else num_steps,
        show=show,
        save_tokenizer=starter.save_tokenizer,
        num_words=len(starter.vocabulary),
    )
