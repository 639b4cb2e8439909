"""Replies of a host's front, in the shapes that harnesses read: vLLM's tokens in, tokens out; OpenAI's two."""

import secrets
import time
from typing import Any, Literal, NamedTuple

import msgspec

from polyrl.hosts.episode import DrawnAnswer
from polyrl.hosts.tools import WrittenCall

ReplyFinish = Literal["stop", "length", "tool_calls"]

_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class CallReply(NamedTuple):
    """The answer to a call, and how its request wants to be told."""

    model: str
    prompt: list[int]
    drawn: DrawnAnswer
    pieces: list[str]
    """The text of each token, if log-probabilities are wanted."""
    with_logprobs: bool = False
    with_token_ids: bool = False

    def usage(self) -> dict[str, int]:
        num_prompt, num = len(self.prompt), len(self.drawn.tokens)
        return {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num}


def generate_body(drawn: DrawnAnswer) -> bytes:
    """Return the body of a reply. Each log-probability names its token as `token_id:N`: clients take the ids from
    there."""
    pairs = zip(drawn.tokens, drawn.logprobs, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
    choice = {
        "index": 0,
        "token_ids": drawn.tokens,
        "finish_reason": drawn.finish,
        "logprobs": {"content": content},
    }
    return _encode({"request_id": secrets.token_hex(12), "choices": [choice]})


def models_body(model: str, max_context: int, created: int) -> bytes:
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "polyrl",
        "max_model_len": max_context,
    }
    return _encode({"object": "list", "data": [card]})


def message_of(content: str, calls: list[WrittenCall]) -> dict[str, Any]:
    """Return the assistant's message, as chats have it."""
    if not calls:
        return {"role": "assistant", "content": content}
    said = [
        {
            "id": secrets.token_hex(5)[:9],  # Mistral's templates want 9 letters and digits
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": said}


def chat_body(reply: CallReply, message: dict[str, Any]) -> bytes:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {**message, "refusal": None},
        "finish_reason": _finish(reply, message),
        "logprobs": _chat_logprobs(reply),
    }
    return _encode({**_head("chat.completion", reply), "choices": [_with_ids(choice, reply)], "usage": reply.usage()})


def chat_stream(reply: CallReply, message: dict[str, Any], *, with_usage: bool) -> bytes:
    """Return the answer as one chunk. It came whole: nothing of it could be told before."""
    calls = message.get("tool_calls")
    delta = {**message, "tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]} if calls else message
    choice = {
        "index": 0,
        "delta": delta,
        "finish_reason": _finish(reply, message),
        "logprobs": _chat_logprobs(reply),
    }
    head = _head("chat.completion.chunk", reply)
    return _events([{**head, "choices": [_with_ids(choice, reply)]}], head, reply, with_usage=with_usage)


def text_body(reply: CallReply, text: str) -> bytes:
    head = _head("text_completion", reply)
    return _encode({**head, "choices": [_text_choice(reply, text)], "usage": reply.usage()})


def text_stream(reply: CallReply, text: str, *, with_usage: bool) -> bytes:
    head = _head("text_completion", reply)
    return _events([{**head, "choices": [_text_choice(reply, text)]}], head, reply, with_usage=with_usage)


def _text_choice(reply: CallReply, text: str) -> dict[str, Any]:
    logprobs = None
    if reply.with_logprobs:
        offsets, at = [], 0
        for piece in reply.pieces:
            offsets.append(at)
            at += len(piece)
        logprobs = {"tokens": reply.pieces, "token_logprobs": reply.drawn.logprobs, "text_offset": offsets}
    choice = {"index": 0, "text": text, "finish_reason": reply.drawn.finish, "logprobs": logprobs}
    return _with_ids(choice, reply)


def _chat_logprobs(reply: CallReply) -> dict[str, Any] | None:
    if not reply.with_logprobs:
        return None
    pairs = zip(reply.pieces, reply.drawn.logprobs, strict=True)
    return {"content": [{"token": piece, "logprob": one, "bytes": None, "top_logprobs": []} for piece, one in pairs]}


def _with_ids(choice: dict[str, Any], reply: CallReply) -> dict[str, Any]:
    if not reply.with_token_ids:
        return choice
    return {**choice, "token_ids": reply.drawn.tokens, "prompt_token_ids": reply.prompt}


def _head(kind: str, reply: CallReply) -> dict[str, Any]:
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    number = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": number, "object": kind, "created": int(time.time()), "model": reply.model}


def _finish(reply: CallReply, message: dict[str, Any]) -> ReplyFinish:
    return "tool_calls" if message.get("tool_calls") and reply.drawn.finish == "stop" else reply.drawn.finish


def _events(chunks: list[Any], head: dict[str, Any], reply: CallReply, *, with_usage: bool) -> bytes:
    told = [*chunks, {**head, "choices": [], "usage": reply.usage()}] if with_usage else chunks
    return b"".join(b"data: " + _encode(one) + b"\n\n" for one in told) + _DONE
