"""The arguments of a judge as values, and the requests that are made of them and of answers.

Rules kept here: every argument is checked before the run starts, and each fault is one line that begins with the
argument's name.
"""

import re
import secrets
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from polyrl.rewards.judging.replies import tokens_of
from polyrl.rewards.judging.verdict import (
    RUBRIC,
    own_template,
    question,
    read_pattern,
    read_verdict,
    schema,
    transcript,
)
from polyrl.rewards.reward import RewardFailed, RewardInput
from polyrl.scheduling.core.bounds import AtLeastOne, Count, NotNegative, Positive

_MARK_BYTES = 6
_REPLY_TOKENS = 512


class JudgeArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `args` of a judge; docs/guides/judge.md has the table."""

    url: str = ""
    model: str = ""
    fleet: bool = False
    api_key_env: str = ""
    rubric: str = RUBRIC
    template: str = ""
    system: str = ""
    min_score: float = 0.0
    max_score: float = 10.0
    pattern: str = ""
    chat: bool = True
    json_schema: bool = True
    temperature: Annotated[float, Meta(le=100)] = 0.0
    reply_tokens: Count = 0
    extra: dict[str, Any] = {}
    concurrency: AtLeastOne = 32
    requests_per_minute: NotNegative = 0.0
    tokens_per_minute: NotNegative = 0.0
    timeout_s: Positive = 20.0
    attempts: AtLeastOne = 5
    pause_s: Positive = 0.5
    usd_per_million_in: NotNegative = 0.0
    usd_per_million_out: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.fleet == bool(self.url):
            raise ValueError("url: expected either an address such as https://api.openai.com/v1, or fleet = true")
        if self.url and not is_url(self.url):
            raise ValueError(f"url: got {self.url!r}, expected an address such as https://api.openai.com/v1")
        if not self.min_score < self.max_score:
            raise ValueError(f"max_score: {self.max_score:g} is not above min_score = {self.min_score:g}")
        if self.template and "{answer}" not in self.template:
            raise ValueError("template: has no place {answer}")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: is no regular expression: {error}") from error


def is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class Questions:
    """Makes requests of answers, and reads scores from replies."""

    def __init__(self, args: JudgeArgs) -> None:
        self._args = args
        self._mark = secrets.token_hex(_MARK_BYTES)
        self._pattern = re.compile(args.pattern)
        self.path = "/chat/completions" if args.chat else "/completions"

    def body(self, given: RewardInput, model: str) -> dict[str, Any]:
        """Return the request for an answer. Raises RewardFailed for a template that names no column of the row."""
        args = self._args
        answer = transcript(given, self._mark)
        own = {"prompt": given.prompt, "answer": answer, "expected": given.expected, "rubric": args.rubric}
        limits = {"min_score": f"{args.min_score:g}", "max_score": f"{args.max_score:g}", "mark": self._mark}
        template = args.template or own_template(with_expected=bool(given.expected))
        try:
            text = question(template, {**given.row, **limits, **own})
        except KeyError as error:
            raise RewardFailed(f"its template names {error}, expected a column of the row") from error
        system = [{"role": "system", "content": args.system}] if args.system else []
        asked: dict[str, Any] = {"messages": [*system, {"role": "user", "content": text}]}
        if not args.chat:
            asked = {"prompt": f"{args.system}{text}"}
        num = args.reply_tokens or (0 if args.fleet else _REPLY_TOKENS)
        if num and "max_completion_tokens" not in args.extra:
            asked["max_tokens"] = num
        if args.temperature >= 0:
            asked["temperature"] = args.temperature
        return {**({"model": model} if model else {}), **asked, **args.extra}

    def with_schema(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"response_format": schema(self._args.min_score, self._args.max_score), **body}

    def score(self, reply: str) -> float:
        """Return the score. Raises NoVerdict."""
        args = self._args
        if args.pattern:
            return read_pattern(reply, self._pattern, args.min_score, args.max_score)
        return read_verdict(reply, args.min_score, args.max_score)

    def about_tokens(self, body: dict[str, Any]) -> int:
        """Estimate the tokens of a request and of the longest reply to it. Only the rates depend on it."""
        return tokens_of(body) + int(body.get("max_tokens", _REPLY_TOKENS))

    def usd(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * self._args.usd_per_million_in + tokens_out * self._args.usd_per_million_out) / 1e6
