"""A reward model behind a server: vLLM's /classify and /score, SGLang's /classify. Requests, and scores from replies.

    vLLM   chat   POST /classify {"model", "messages", "use_activation": false}      {"data": [{"probs": [...]}]}
           text   POST /classify {"model", "input", "use_activation": false}         the same
           pair   POST /score    {"model", "text_1", "text_2", "use_activation": false}   {"data": [{"score": ...}]}
    SGLang text   POST /classify {"model", "text"}                                   [{"embedding": [...]}]

Both are asked for logits: what becomes of them is the same as in a process of ours. (SGLang's /v1/classify has a
softmax, which makes 1 of any single logit.)
"""

import math
from typing import Any

from polyrl.rewards.models.classifier import prompt_of, to_score
from polyrl.rewards.models.settings import RewardModelArgs
from polyrl.rewards.retrying import TryAgain
from polyrl.rewards.reward import RewardFailed, RewardInput


def request(args: RewardModelArgs, given: RewardInput, model: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the body that ask for an answer's score. Raises RewardFailed."""
    prompt, answer = prompt_of(given, args.prompt_key), given.conversation
    named = {"model": model} if model else {}
    if args.server == "sglang":
        return "/classify", {**named, "text": _text(prompt) + answer}
    more: dict[str, Any] = {**named, "use_activation": False}
    if args.truncate != "no":
        more |= {"truncate_prompt_tokens": args.max_tokens or -1, "truncation_side": args.truncate}
    if args.served_form == "pair":
        return "/score", {**more, "text_1": _text(prompt), "text_2": answer}
    if args.served_form == "text":
        return "/classify", {**more, "input": _text(prompt) + answer}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return "/classify", {**more, "messages": [*messages, {"role": "assistant", "content": answer}]}


def _text(prompt: str | list[dict[str, Any]]) -> str:
    if not isinstance(prompt, str):
        raise RewardFailed('args.prompt_key: names messages, which only form = "chat" can send')
    return prompt


def read_score(args: RewardModelArgs, reply: Any) -> float:
    """Return the score of a reply. Raises TryAgain for another shape, RewardFailed for a label that is not there.

    A server writes null for NaN, which is no number here either.
    """
    try:
        if args.server == "sglang":
            logits = (reply[0] if isinstance(reply, list) else reply)["embedding"]
        else:
            first = reply["data"][0]
            logits = [first["score"]] if "score" in first else first["probs"]
        numbers = [_number(one) for one in logits]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise TryAgain("a reply without scores") from error
    if not numbers:
        raise TryAgain("a reply without scores")
    if len(numbers) > 1 and args.label == "":
        raise RewardFailed(f"args.label: missing; the model has {len(numbers)} labels")
    return to_score(numbers, int(args.label or 0), sigmoid=args.sigmoid)


def _number(said: Any) -> float:
    """Return a number, NaN for null. Raises TypeError, and OverflowError for a whole number that is too large."""
    if said is None:
        return math.nan
    if isinstance(said, bool) or not isinstance(said, int | float):
        raise TypeError(f"{type(said).__name__}, expected a number")
    return float(said)
