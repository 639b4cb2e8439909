"""Requests of OpenAI's clients: its fields, and a few of vLLM's. Each field is honoured, ignored or refused by name.

Rules kept here: a field that would change the answer and that we do not honour is refused, and so is an unknown field.
A field that is null counts as left out.
"""

import secrets
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

from polyrl.errors import RequestError
from polyrl.wire.control import TokenId
from polyrl.wire.frames import Sampling

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_PROMPTS = 256
MAX_TOKENS = 1 << 20
"""Token ids of a prompt, where the model's context is not known."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default."""
_LARGEST_TOKEN = (1 << 31) - 1

Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
AtLeastOne = Annotated[int, Meta(ge=1, lt=1 << 31)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]


# Refusals, in the shape that OpenAI's clients read

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "rate_limit_error",
    "api_error",
]
_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_SERVER_ERROR = 500


class ErrorBody(Struct, frozen=True, kw_only=True):
    message: str
    type: ErrorType
    param: str | None = None
    """Which field is wrong, if one is."""
    code: str | None = None


class AskErrorReply(Struct, frozen=True, kw_only=True):
    error: ErrorBody


class AskError(RequestError):
    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def reply(self) -> AskErrorReply:
        return error_reply(self.status, str(self), param=self.param, code=self.code)


def error_reply(status: int, message: str, *, param: str | None = None, code: str | None = None) -> AskErrorReply:
    kind = _TYPES.get(status, "api_error" if status >= _SERVER_ERROR else "invalid_request_error")
    return AskErrorReply(error=ErrorBody(message=message, type=kind, param=param, code=code))


def wrong(param: str, message: str, *, code: str | None = None) -> AskError:
    """Return the refusal of a field."""
    return AskError(400, f"{param}: {message}", param=param, code=code)


# Requests


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


class _Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of completions and of chats."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: AtLeastOne | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] | None = None
    stop: StopText | Annotated[tuple[StopText, ...], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Beside OpenAI's, as vLLM names them.
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    """-1 and 0: all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    # Not honoured: refused unless they say what holds anyway.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Without influence on the answer.
    user: str | None = None


class CompletionRequest(_Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    """A text, token ids, or a list of either."""
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None
    """Of the tokens that were drawn; those of others are not known."""
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatRequest(_Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """For the model's chat template, for example `{"enable_thinking": false}`."""
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class Choices(NamedTuple):
    """How a request wants to be answered, be it a completion or a chat."""

    num: int
    max_tokens: int | None
    seed: int
    sampling: Sampling
    stops: tuple[str, ...]
    is_streamed: bool
    with_usage: bool
    with_logprobs: bool
    with_token_ids: bool


def completion_choices(request: CompletionRequest) -> Choices:
    _refuse(request, "echo", None, False)
    _refuse(request, "suffix", None, "")
    _refuse(request, "best_of", None, 1 if request.n is None else request.n)
    most = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return _choices(request, most, with_logprobs=request.logprobs is not None)


def chat_choices(request: ChatRequest) -> Choices:
    _refuse(request, "tools", None, [])
    _refuse(request, "tool_choice", None, "none", "auto")
    _refuse(request, "response_format", None, {"type": "text"})
    _refuse(request, "top_logprobs", None, 0)
    for place, message in enumerate(request.messages):
        if not isinstance(message.get("role"), str):
            raise wrong(f"messages[{place}].role", "expected a text, for example user")
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return _choices(request, most, with_logprobs=request.logprobs is True)


def flat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose content is text: parts are joined, and anything but text is refused."""
    return [{**message, "content": _content(message.get("content"), place)} for place, message in enumerate(messages)]


def _content(content: object, place: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = [_part(part) for part in content] if isinstance(content, list) else [None]
    if None in texts:
        raise wrong(f"messages[{place}].content", "expected a text, or parts of type text")
    return "\n".join(text for text in texts if text is not None)


def _part(part: object) -> str | None:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def _choices(request: _Options, max_tokens: int | None, *, with_logprobs: bool) -> Choices:
    _refuse(request, "frequency_penalty", None, 0)
    _refuse(request, "presence_penalty", None, 0)
    _refuse(request, "logit_bias", None, {})
    options = request.stream_options
    if options is not None and not request.stream:
        raise wrong("stream_options", "only with stream")
    stop = () if request.stop is None else (request.stop,) if isinstance(request.stop, str) else request.stop
    sampling = Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=0 if request.top_k is None else max(0, request.top_k),
        min_p=0.0 if request.min_p is None else request.min_p,
        stop_ids=() if request.stop_token_ids is None else request.stop_token_ids,
        ignore_eos=request.ignore_eos is True,
    )
    return Choices(
        num=1 if request.n is None else request.n,
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if request.seed is None else request.seed % (1 << 63),
        sampling=sampling,
        stops=stop,
        is_streamed=request.stream is True,
        with_usage=options is not None and options.include_usage is True,
        with_logprobs=with_logprobs,
        with_token_ids=request.return_token_ids is True,
    )


def prompts_of(prompt: str | list[Any], longest: int | None = None) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids, of which there are at most `longest`."""
    most = MAX_TOKENS if longest is None else longest
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise wrong("prompt", "it is empty")
    if isinstance(prompt[0], int):
        return [_token_ids(prompt, most)]
    if len(prompt) > MAX_PROMPTS:
        raise wrong("prompt", f"{len(prompt)} prompts; expected at most {MAX_PROMPTS}")
    return [one if isinstance(one, str) else _token_ids(one, most) for one in prompt]


def _token_ids(given: object, most: int) -> list[int]:
    if not isinstance(given, list) or not given:
        raise wrong("prompt", "expected a text, token ids, or a list of either")
    if len(given) > most:  # before they are looked at, which takes a tenth of a second for a million
        message = f"prompt: {len(given)} token ids; expected at most {most}"
        raise AskError(400, message, param="prompt", code="context_length_exceeded")
    if {*map(type, given)} != {int} or min(given) < 0 or max(given) > _LARGEST_TOKEN:
        bad = next(one for one in given if type(one) is not int or not 0 <= one <= _LARGEST_TOKEN)
        raise wrong("prompt", f"expected token ids, whole numbers from 0 on; got {str(bad)[:40]}")
    return given


def _refuse(request: _Options, field: str, *fine: object) -> None:
    if getattr(request, field) not in fine:
        raise wrong(field, "not supported here; leave it out", code="unsupported_parameter")
