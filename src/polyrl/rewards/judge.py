"""A judge: a language model behind an OpenAI-compatible service, or this run's own fleet, that scores answers.

    [[rewards.functions]]
    function = "judge"
    args = { url = "https://api.openai.com/v1", model = "gpt-5-mini", api_key_env = "OPENAI_API_KEY" }

docs/guides/judge.md has all arguments, what a judge costs, and what fails how.

Rules kept here: a judge that is away, slow, or says what is no verdict is asked again, and then there is no reward
(RewardUnavailable): never a zero. A wrong key, and a budget that is used up, end the run with one line (RewardStops).
All of that happens before the answer's own time limit, which would count against the answer.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from polyrl.config.load import build
from polyrl.rewards.endpoint import Endpoint, ServiceRefused
from polyrl.rewards.facts import RunFacts
from polyrl.rewards.judging.account import JudgeAccount, JudgeLimits
from polyrl.rewards.judging.place import endpoint
from polyrl.rewards.judging.questions import JudgeArgs, Questions
from polyrl.rewards.judging.replies import JudgeReply, model_names, read_reply, tokens_of
from polyrl.rewards.judging.verdict import NoVerdict
from polyrl.rewards.retrying import Attempts, BadQuestion, TryAgain, with_attempts
from polyrl.rewards.reward import Reward, RewardInput, RewardStops, RewardUnavailable

_FOR_THE_REPLY = 1 / 3
"""The share of an answer's time that a request must have left when it is sent."""
_CHECK_S = 10.0
_WRONG_KEY = (401, 403)
_LOOK_AGAIN_S = 0.5


class Judge:
    """Made once in each process; the arguments are those of JudgeArgs."""

    def __init__(self, **args: Any) -> None:
        wanted = self._args = build(args, JudgeArgs)
        facts = self._facts = RunFacts.read()
        self._questions = Questions(wanted)
        self._with_schema = wanted.json_schema and wanted.chat and not wanted.fleet and not wanted.pattern
        self._share = facts.share(wanted.concurrency)
        self.places = asyncio.Semaphore(self._share)
        """Answers that are judged at once. The time of those that wait does not run."""
        self._attempts = Attempts(wanted.attempts, wanted.pause_s)
        self._account = JudgeAccount(Path(facts.run_dir) if facts.run_dir else None)
        self._limits = _limits(wanted, facts)
        self._endpoint: Endpoint | None = None
        self._model = wanted.model
        self._pause_until = 0.0
        """The time of the event loop until which the service wants no requests."""

    @staticmethod
    def check_args(**args: Any) -> None:
        build(args, JudgeArgs)

    async def start(self) -> None:
        """Look for the service and its models. A service that is away may come back; a refused key stays refused."""
        if self._facts.max_usd is not None and not self._args.fleet and not self._limits_dollars():
            raise RewardStops(
                "rewards.max_usd: cannot be counted without args.usd_per_million_in and _out of the judge"
            )
        self._endpoint = endpoint(self._args, self._facts, self._share)
        try:
            names = model_names(await self._endpoint.get("/models", min(_CHECK_S, self._args.timeout_s)))
        except (TryAgain, BadQuestion) as error:
            if not self._model and not self._args.fleet:
                raise RewardUnavailable(f"{self._args.url}: {error}") from error
            names = []
        except ServiceRefused as error:
            if error.status in _WRONG_KEY:
                raise
            names = []  # a service need not list its models
        if not self._model and not self._args.fleet:
            if len(names) != 1:
                there = f"; it has {', '.join(names[:5])}" if names else ""
                raise RewardStops(f"args.model: missing, and {self._args.url} does not have exactly one{there}")
            self._model = names[0]

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()

    async def __call__(self, given: RewardInput) -> Reward:
        body = self._questions.body(given, self._model)
        what, hint = self._args.url, ""
        if self._args.fleet:
            what, hint = "the fleet", "; only workers of [fleet], or that have joined, answer"

        async def attempt(number: int, deadline: float) -> float:
            return await self._attempt(body, number, deadline)

        return Reward(await with_attempts(attempt, self._attempts, self._facts.patience_s, what, hint))

    async def _attempt(self, body: dict[str, Any], number: int, deadline: float) -> float:
        """Ask once. Raises TryAgain, BadQuestion, RewardStops."""
        about = self._questions.about_tokens(body)
        await self._admitted(about, deadline)
        self._account.send(is_retry=number > 0)
        try:
            reply, took_s = await self._request(body, deadline)
        except TryAgain as trouble:
            if trouble.after_s is not None:
                pause_s = min(trouble.after_s, self._attempts.longest_asked_s)
                self._pause_until = max(self._pause_until, asyncio.get_running_loop().time() + pause_s)
            raise
        usd = self._questions.usd(reply.tokens_in, reply.tokens_out)
        self._account.pay(
            self._limits,
            admitted=about,
            tokens_in=reply.tokens_in,
            tokens_out=reply.tokens_out,
            usd=usd,
            latency_s=took_s,
        )
        try:
            return self._questions.score(reply.text)
        except NoVerdict as error:
            cut = " (it was cut off: args.reply_tokens)" if reply.finish == "length" else ""
            raise TryAgain(f"{error}{cut}") from error

    async def _admitted(self, about: int, deadline: float) -> None:
        """Wait until the rates allow a request. Raises RewardUnavailable if they do not in time."""
        loop = asyncio.get_running_loop()
        reserve_s = min(self._args.timeout_s, _FOR_THE_REPLY * self._facts.patience_s)
        while True:
            left_s = deadline - reserve_s - loop.time()
            pause_s = self._pause_until - loop.time()
            wait_s = None
            if pause_s <= max(0.0, left_s):
                now = time.monotonic()
                wait_s = self._account.admit(
                    self._limits,
                    tokens=about,
                    now=now + max(0.0, pause_s),
                    within_s=left_s - max(0.0, pause_s),
                )
            if wait_s is not None:
                await asyncio.sleep(wait_s + max(0.0, pause_s))
                return
            if left_s <= 0:
                raise RewardUnavailable("no request is allowed in time: lower rewards.slots or raise rewards.timeout_s")
            await asyncio.sleep(min(_LOOK_AGAIN_S, left_s + 0.001))

    async def _request(self, body: dict[str, Any], deadline: float) -> tuple[JudgeReply, float]:
        assert self._endpoint is not None, "start comes first"
        loop, path = asyncio.get_running_loop(), self._questions.path
        began, with_schema = loop.time(), self._with_schema

        def timeout_s() -> float:
            return min(self._args.timeout_s, max(0.05, deadline - loop.time()))

        try:
            asked = self._questions.with_schema(body) if with_schema else body
            reply = await self._endpoint.post(path, asked, timeout_s())
        except BadQuestion:
            if not with_schema:
                raise
            reply = await self._endpoint.post(path, body, timeout_s())
            self._with_schema = False  # the service refused the schema, not the answer
        return read_reply(reply, tokens_of(body)), loop.time() - began

    def _limits_dollars(self) -> bool:
        return bool(self._args.usd_per_million_in or self._args.usd_per_million_out)


def _limits(args: JudgeArgs, facts: RunFacts) -> JudgeLimits:
    """Return the limits of the account: of the run's, or, without a run, this process's share of them."""
    of = 1 if facts.run_dir else facts.processes
    return JudgeLimits(
        None if facts.max_usd is None else facts.max_usd / of,
        None if facts.max_tokens is None else max(1, facts.max_tokens // of),
        args.requests_per_minute / of,
        args.tokens_per_minute / of,
    )
