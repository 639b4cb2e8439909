"""Replies of OpenAI-compatible services: the text of the only choice, and the tokens that it took. All of it bounded.

Where a service counts no tokens, `tokens_of` estimates them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from polyrl.rewards.retrying import TryAgain

_MOST_TOKENS = 100_000_000
_BYTES_PER_TOKEN = 4


class JudgeReply(NamedTuple):
    text: str
    finish: str
    tokens_in: int
    tokens_out: int


def tokens_of(asked: str | Mapping[str, Any]) -> int:
    """Estimate the tokens of a text, or of a request: one for every four bytes."""
    raw = asked.encode() if isinstance(asked, str) else msgspec.json.encode(asked, enc_hook=str)
    return -(-len(raw) // _BYTES_PER_TOKEN)


def read_reply(reply: Any, tokens_asked: int) -> JudgeReply:
    """Take a reply apart. `tokens_asked` estimates the request's. Raises TryAgain for another shape than OpenAI's."""
    text, finish = _choice(reply)
    usage = reply.get("usage") if isinstance(reply, dict) else None
    tokens_in = _count(usage, "prompt_tokens", tokens_asked)
    return JudgeReply(text, finish, tokens_in, _count(usage, "completion_tokens", tokens_of(text)))


def model_names(reply: Any) -> list[str]:
    """Return the models that a service lists; none where it lists them in another way."""
    listed = reply.get("data") if isinstance(reply, dict) else None
    found = [one.get("id") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [one for one in found if isinstance(one, str)]


def _choice(reply: Any) -> tuple[str, str]:
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        finish = str(choice.get("finish_reason"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TryAgain("a reply without choices") from error
    if not isinstance(text, str):
        raise TryAgain("a reply without text")
    return text, finish


def _count(usage: Any, name: str, estimate: int) -> int:
    number = usage.get(name) if isinstance(usage, dict) else None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MOST_TOKENS:
        return estimate
    return number
