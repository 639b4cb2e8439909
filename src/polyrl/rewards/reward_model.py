"""A reward model: a sequence classifier that scores answers, in a process of ours or behind vLLM or SGLang.

    [[rewards.functions]]
    function = "reward_model"
    args = { path = "models/my-reward-model" }

docs/guides/judge.md has all arguments, and what fails how.

Rules kept here: the model is loaded once in each process, before the first answer's time begins. Answers that wait
together are computed together. A score that is no number is a failure of its answer, never a zero.
"""

import asyncio
from typing import Any

from polyrl.config.load import build
from polyrl.rewards.endpoint import Endpoint, key_of
from polyrl.rewards.facts import RunFacts
from polyrl.rewards.models.batches import Batches
from polyrl.rewards.models.classifier import Classifier, InputTokens
from polyrl.rewards.models.served import read_score, request
from polyrl.rewards.models.settings import RewardModelArgs
from polyrl.rewards.retrying import Attempts, with_attempts
from polyrl.rewards.reward import Reward, RewardInput


class RewardModel:
    """Made once in each process; the arguments are those of RewardModelArgs."""

    def __init__(self, **args: Any) -> None:
        self._args = build(args, RewardModelArgs)
        self._facts = RunFacts.read()
        self._model: Classifier | None = None
        self._batches: Batches[InputTokens] | None = None
        self._endpoint: Endpoint | None = None
        self.places = asyncio.Semaphore(self._facts.share(self._args.concurrency)) if self._args.url else None
        """Answers that a server is asked for at once. The time of those that wait does not run."""

    @staticmethod
    def check_args(**args: Any) -> None:
        build(args, RewardModelArgs)

    async def start(self) -> None:
        """Load the model, or open the connections. Raises RewardStops."""
        args = self._args
        if args.url:
            hint = "check args.url, args.server and args.model; args.api_key_env names the variable with its key"
            self._endpoint = Endpoint(args.url, key=key_of(args.api_key_env), hint=hint, connections=args.concurrency)
            return
        self._model = await asyncio.to_thread(Classifier, args)
        self._batches = Batches(self._model.scores, args.batch_size, args.wait_ms / 1000)

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._batches is not None:
            await self._batches.close()

    async def __call__(self, given: RewardInput) -> Reward:
        if self._endpoint is not None:
            return Reward(await self._request(self._endpoint, given))
        assert self._model is not None and self._batches is not None, "start comes first"
        return Reward(await self._batches.score(self._model.encode(given)))

    @property
    def num_batches(self) -> int:
        """The number of batches computed in this process."""
        return 0 if self._model is None else self._model.num_batches

    async def _request(self, endpoint: Endpoint, given: RewardInput) -> float:
        args = self._args
        path, body = request(args, given, args.model)

        async def attempt(_: int, deadline: float) -> float:
            left_s = max(0.05, deadline - asyncio.get_running_loop().time())
            return read_score(args, await endpoint.post(path, body, min(args.timeout_s, left_s)))

        rules = Attempts(args.attempts, args.pause_s)
        return await with_attempts(attempt, rules, self._facts.patience_s, args.url)
