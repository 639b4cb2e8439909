"""Replies of OpenAI-compatible services: the text of the only choice, and the tokens that it took. All of it bounded.

A service that counts no tokens is taken to have used one for every four bytes.
"""

from typing import Any, NamedTuple

from polyrl.rewards.retrying import TryAgain

_MOST_TOKENS = 100_000_000
_BYTES_PER_TOKEN = 4


class JudgeReply(NamedTuple):
    text: str
    finish: str
    tokens_in: int
    tokens_out: int


def read_reply(reply: Any, num_bytes_asked: int) -> JudgeReply:
    """Raises TryAgain for what has not OpenAI's shape."""
    text, finish = _choice(reply)
    usage = reply.get("usage") if isinstance(reply, dict) else None
    tokens_in = _count(usage, "prompt_tokens", num_bytes_asked)
    return JudgeReply(text, finish, tokens_in, _count(usage, "completion_tokens", len(text.encode())))


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


def _count(usage: Any, name: str, num_bytes: int) -> int:
    number = usage.get(name) if isinstance(usage, dict) else None
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MOST_TOKENS:
        return -(-num_bytes // _BYTES_PER_TOKEN)
    return number
