"""Bodies of requests at a host's front: each field is honoured, ignored, or refused by name.

Rules kept here: unknown fields are taken, because every harness brings some. Fields that would change the answer and
that are not honoured are refused. Sampling is the run's: other values are ignored, and warned of once by name.
"""

import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from polyrl.errors import PolyrlError, plain, shorten
from polyrl.hosts.episode import CallLimits
from polyrl.not_data import NOT_DATA
from polyrl.wire.frames import Sampling

log = logging.getLogger(__name__)

MAX_STOPS = 16
MAX_MESSAGES = 10_000
MAX_TOOLS = 512
_LARGEST_TOKEN = (1 << 31) - 1

_HARMLESS: Mapping[str, object] = {
    "n": 1,
    "best_of": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": [],
    "allowed_token_ids": None,
    "structured_outputs": None,
    "guided_json": None,
    "guided_regex": None,
}
"""Fields that would change the answer, and the value at which they do not."""

_HALVES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
"""Escaped backslashes and whole pairs, which stay, and halves of pairs."""

FrontToken = Annotated[int, Meta(ge=0, le=_LARGEST_TOKEN)]
_AtLeastOne = Annotated[int, Meta(ge=1)]
_StopText = Annotated[str, Meta(min_length=1, max_length=256)]
_StopTexts = _StopText | Annotated[tuple[_StopText, ...], Meta(max_length=MAX_STOPS)] | None
_StopIds = Annotated[tuple[FrontToken, ...], Meta(max_length=256)] | None
Body = TypeVar("Body", bound=Struct)


class FrontRefusal(PolyrlError):
    """A request that is not answered. The message is one line; `status` is one that no client asks again for."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(shorten(plain(message)))
        self.status, self.param, self.code = status, param, code

    def body(self) -> bytes:
        kind = "not_found_error" if self.status == 404 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class _Sampled(Struct, kw_only=True):
    """Fields of all requests."""

    max_tokens: _AtLeastOne | None = None
    stop: _StopTexts = None
    stop_token_ids: _StopIds = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: list[Any] | None = None
    allowed_token_ids: list[Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None


class GenerateParams(_Sampled, kw_only=True):
    """`sampling_params` of `/inference/v1/generate`."""


class GenerateBody(Struct, kw_only=True):
    token_ids: Annotated[list[FrontToken], Meta(min_length=1)]
    sampling_params: GenerateParams = msgspec.field(default_factory=GenerateParams)
    model: str | None = None


class CompletionBody(_Sampled, kw_only=True):
    prompt: str | list[Any]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None


class ChatBody(_Sampled, kw_only=True):
    messages: Annotated[list[Any], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: _AtLeastOne | None = None
    tools: Annotated[list[Any], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None


def read_body(raw: bytes, kind: type[Body]) -> Body:
    """Raises FrontRefusal. A half of a character, which Python's JSON writes for bytes that are no text, is read as the
    mark of what cannot be shown."""
    try:
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError:
            whole = _HALVES.sub(_mark_halves, raw)
            if whole == raw:
                raise
            return msgspec.json.decode(whole, type=kind)
    except NOT_DATA as error:
        raise FrontRefusal(f"the body cannot be read: {error}") from error


def _mark_halves(found: "re.Match[bytes]") -> bytes:
    escape = found[0]
    return escape if len(escape) != len(rb"\ud800") else rb"\ufffd"


class Limiter:
    """Makes a call's limits of a request, and says which sampling it ignores, each name once."""

    def __init__(self, sampling: Sampling) -> None:
        self._ours: dict[str, object] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": None,
        }
        self._warned: set[str] = set()

    def limits(self, body: _Sampled, max_tokens: int | None = None) -> CallLimits:
        """Raises FrontRefusal for fields that would change the answer."""
        for field, fine in _HARMLESS.items():
            _refuse(body, field, None, fine)
        self._warn(body)
        stop = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else body.stop
        most = body.max_tokens if max_tokens is None else max_tokens
        return CallLimits(most, body.stop_token_ids or (), stop)

    def _warn(self, body: _Sampled) -> None:
        for name, ours in self._ours.items():
            asked = getattr(body, name)
            is_all = name == "top_k" and asked == -1 and ours == 0
            if asked is not None and asked != ours and not is_all and name not in self._warned:
                self._warned.add(name)
                log.warning("%s = %s is ignored: sampling is the run's, whatever an environment asks for", name, asked)


def refuse_what_completions_lack(body: CompletionBody) -> None:
    _refuse(body, "echo", None, False)
    _refuse(body, "suffix", None, "")


def refuse_what_chats_lack(body: ChatBody) -> None:
    _refuse(body, "top_logprobs", None, 0, 1)
    _refuse(body, "response_format", None, {"type": "text"})
    if body.tool_choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice")


def _refuse(body: Struct, field: str, *fine: object) -> None:
    if getattr(body, field) not in fine:
        raise _unsupported(field)


def _unsupported(field: str) -> FrontRefusal:
    return FrontRefusal(f"{field}: not supported here; leave it out", param=field, code="unsupported_parameter")


# Messages and tools


def checked_messages(messages: list[Any], where: str = "messages") -> list[dict[str, Any]]:
    """Return messages whose shape templates can rely on. Raises FrontRefusal, which names the first wrong place."""
    return [_message(message, f"{where}[{place}]") for place, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _shape(where, message, "an object with role and content")
    if not isinstance(message.get("role"), str):
        raise _shape(f"{where}.role", message.get("role"), "a text, for example user")
    made = {**message, "content": _content(message.get("content"), f"{where}.content")}
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise _shape(f"{where}.tool_calls", calls, "a list")
        for place, call in enumerate(calls):
            _check_call(call, f"{where}.tool_calls[{place}]")
    return made


def _check_call(call: object, where: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _shape(where, call, "an object with function.name")


def _content(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _shape(where, content, "a text, or parts of type text")
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _shape(where, part, "parts of type text")
        texts.append(text)
    return "\n".join(texts)


def checked_tools(tools: list[Any]) -> list[dict[str, Any]]:
    """Raises FrontRefusal."""
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _shape(f"tools[{place}]", tool, "an object with function.name")
    return tools


def checked_prompt(prompt: str | list[Any]) -> str | list[int]:
    """Return the one prompt of a completion. Raises FrontRefusal."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str | list):
        return checked_prompt(prompt[0])
    for one in prompt:
        if type(one) is not int or not 0 <= one <= _LARGEST_TOKEN:
            raise _shape("prompt", one, "a text, or token ids; one prompt a request")
    if not prompt:
        raise FrontRefusal("prompt: it has no tokens", param="prompt")
    return prompt


def _shape(where: str, found: object, expected: str) -> FrontRefusal:
    kinds: Mapping[type, str] = {str: "a text", dict: "an object", list: "a list", type(None): "null"}
    kind = kinds.get(type(found), type(found).__name__)
    return FrontRefusal(f"{where}: got {kind}, expected {expected}", param=where)
