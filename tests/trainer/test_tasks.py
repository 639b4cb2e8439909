"""A recipe's prompts and rewards: what is done once for a prompt, whatever the number of its samples."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyrl.config.recipe import DomainSection
from polyrl.config.rewards import RewardsSection, WeightedReward
from polyrl.data.characters import save_tokenizer
from polyrl.data.prompts import Messages
from polyrl.data.sources import open_training
from polyrl.data.tokens import ModelTokenizer
from polyrl.rewards.reward import Reward, RewardInput
from polyrl.run.task_contract import Answered
from polyrl.run.tasks import Domain, RecipeTasks

NOTHING: Mapping[str, Any] = {}
TEMPLATE = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}<assistant>"


class CountingTokenizer(ModelTokenizer):
    """Counts how often a prompt is written out."""

    num_written = 0

    def written(self, prompt: str | Messages, chat: Mapping[str, Any] = NOTHING) -> str:
        self.num_written += 1
        return super().written(prompt, chat)


class Echo:
    """A pool whose reward is how long a prompt is, as the reward sees it."""

    def __init__(self) -> None:
        self.given: list[RewardInput] = []

    async def score(self, name: str, given: RewardInput, args: object = None) -> Reward:
        self.given.append(given)
        return Reward(float(len(given.prompt)), {})


@pytest.fixture
def tokenizer(tmp_path: Path) -> CountingTokenizer:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return CountingTokenizer(str(tmp_path))


def test_a_chat_template_is_rendered_once_for_all_samples_of_a_prompt(tokenizer: CountingTokenizer):
    domain = DomainSection(name="sums", source="arithmetic", chat=True)
    source = open_training(domain, tokenizer, seed=0, max_tokens=None, needs_answer=True, key="data")
    for prompt in range(2):
        source.tokens(prompt)
    before = tokenizer.num_written
    pool: Any = Echo()
    tasks = RecipeTasks(
        [Domain("sums", (WeightedReward(function="arithmetic"),), source, {})], tokenizer, pool, RewardsSection()
    )

    async def score_all() -> None:
        for prompt in (0, 1):
            for number in range(8):
                await tasks.score(0, prompt, Answered([number], "stop"))

    asyncio.run(score_all())
    assert tokenizer.num_written - before == 2
    assert len(pool.given) == 16
    assert {one.prompt for one in pool.given} == {tokenizer.written(source.task(prompt).prompt) for prompt in (0, 1)}
