"""Teachers of the small models that the recipes here start from: they know the format of an answer, and play badly.

A teacher reads the text of a prompt and writes the next answer. `WORDS` says where a task's texts are cut into tokens.
"""

import random
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

START, END = "<start>", "<end>"
TOOLS_TEMPLATE = (
    "{% if tools %}<start>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call><end>\n{% endif %}"
    "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
_CALLS = 0.4
"""The share of sums for which the teacher calls the tool."""
_COPIES = 0.9
"""The probability that the teacher copies a number as it is."""


class TaughtTask(NamedTuple):
    environment: str
    args: dict[str, Any]
    teacher: Callable[[str, random.Random], str]
    words: str
    """A regular expression; each match is a token."""
    num_episodes: int
    num_steps: int
    template: str | None = None
    always: tuple[str, ...] = ()
    """Tokens that there are whether or not a lesson has them."""


def walk(_: str, draws: random.Random) -> str:
    """Walk across the lake without looking."""
    return draws.choice(("up", "down", "left", "right"))


def guess(prompt: str, draws: random.Random) -> str:
    """Guess a result: every third time the right one, and off by up to two otherwise."""
    first, sign, second = re.findall(r"(\d+) ([+-]) (\d+) =", prompt)[-1]
    right = int(first) + int(second) if sign == "+" else int(first) - int(second)
    return str(right + draws.randint(-1, 1) + draws.randint(-1, 1))


def call(prompt: str, draws: random.Random) -> str:
    """Call the tool now and then, mistype now and then, and guess otherwise."""
    last = prompt.rsplit(START, 2)[1]
    if last.startswith("tool"):
        return _copied(last.removeprefix("tool").partition(END)[0].strip(), draws)
    first, second = re.findall(r"What is (\d+) \+ (\d+)", prompt)[-1]
    if draws.random() >= _CALLS:
        return str(max(0, int(first) + int(second) + draws.randint(-9, 9)))
    (name,) = re.findall(r'"name": "(\w*add)"', prompt)[-1:]
    terms = f'"a": {_copied(first, draws)}, "b": {_copied(second, draws)}'
    return f'<tool_call>{{"name": "{name}", "arguments": {{{terms}}}}}</tool_call>'


def _copied(number: str, draws: random.Random) -> str:
    if draws.random() < _COPIES or not number.isdigit():
        return number
    return str(max(0, int(number) + draws.randint(-9, 9)))


TASKS: Mapping[str, TaughtTask] = {
    "frozen-lake": TaughtTask(
        environment="textarena",
        args={"game": "FrozenLake-v0"},
        teacher=walk,
        words=r"\|[^|\n]+|\|?\n|[^|\n]+\n?",
        num_episodes=1500,
        num_steps=500,
    ),
    "chain-sum": TaughtTask(
        environment="reasoning-gym",
        args={
            "dataset": "chain_sum",
            "size": 4000,
            "seed": 1_000_003,
            "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        },
        teacher=guess,
        words=r"-?[0-9]+|[^0-9-]+|-",
        num_episodes=4000,
        num_steps=2000,
        always=tuple(map(str, range(-20, 40))),
    ),
    "sums": TaughtTask(
        environment="verifiers",
        args={"taskset": {"id": "polyrl_sums", "largest": 9}, "agent": {"max_turns": 4}},
        teacher=call,
        words=r"[0-9]+|<[^>]*>|[^0-9<]+",
        num_episodes=400,
        num_steps=1500,
        template=TOOLS_TEMPLATE,
        always=tuple(map(str, range(100))),
    ),
}
