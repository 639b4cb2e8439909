"""Record episodes that a teacher plays, with the Python that has the environment's package.

    python examples/environments/record.py frozen-lake lessons.jsonl

A line is an episode: [[is drawn, text], ...]. The environment is played by PolyRL's own host, so that a lesson looks
like an episode of a run.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teachers import END, START, TASKS, TaughtTask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from polyrl.data.chat_template import ChatTemplate
from polyrl.hosts.episode import CallLimits, DrawnAnswer, Episode
from polyrl.hosts.front import HostFront
from polyrl.hosts.own import HostParts
from polyrl.hosts.registry import find_environment
from polyrl.hosts.texts import ModelText

CONTEXT = 30_000
AT_ONCE = 16


def bytes_as_tokens() -> tuple[Tokenizer, int]:
    """Return a tokenizer of bytes, and the token that ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    return tokenizer, tokenizer.get_vocab()[END]


class TaughtEpisode(Episode):
    """An episode whose policy is the teacher. `spans` is what was said, and who said it."""

    def __init__(self, task: TaughtTask, text: ModelText, end_id: int, index: int) -> None:
        super().__init__(f"1/{index}", index=index, seed=1_000_003, max_context=CONTEXT)
        self._task, self._text, self._end_id = task, text, end_id
        self._draws = random.Random(index)
        self._before: list[int] = []
        self.spans: list[tuple[bool, str]] = []

    async def draw(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        assert list(prompt[: len(self._before)]) == self._before, "the conversation goes on as it was"
        answer = self._task.teacher(self._text.decode(prompt, special=True), self._draws)
        tokens = [*self._text.encode(answer), self._end_id]
        self.spans += [(False, self._text.decode(prompt[len(self._before) :], special=True)), (True, answer)]
        self._before = [*prompt, *tokens]
        return DrawnAnswer(tokens, [0.0] * len(tokens), "stop")


async def record(task: TaughtTask, num_episodes: int) -> list[list[tuple[bool, str]]]:
    tokenizer, end_id = bytes_as_tokens()
    template = None if task.template is None else ChatTemplate(task.template, {})
    text = ModelText(tokenizer, template=template, end_ids=frozenset({end_id}), max_context=CONTEXT)
    front = HostFront(max_context=CONTEXT, text=text)
    await front.start()
    environment = find_environment(task.environment, task.args, HostParts(front, text))
    await environment.start()
    places = asyncio.Semaphore(AT_ONCE)

    async def play(index: int) -> list[tuple[bool, str]]:
        episode = TaughtEpisode(task, text, end_id, index)
        async with places:
            await environment.play(episode)
        return episode.spans

    try:
        return await asyncio.gather(*map(play, range(num_episodes)))
    finally:
        await environment.close()
        await front.close()


def main() -> None:
    parser: Any = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--episodes", type=int, default=None)
    args = parser.parse_args()
    task = TASKS[args.task]
    episodes = asyncio.run(record(task, args.episodes or task.num_episodes))
    args.out.write_text("".join(json.dumps(one) + "\n" for one in episodes), encoding="utf-8")


if __name__ == "__main__":
    main()
