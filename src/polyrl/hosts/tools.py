"""Tool calls in what a model wrote, by the family of its chat template.

    hermes     <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Qwen 2.5 and 3, Hermes, SmolLM
    xml        <tool_call><function=add><parameter=a>1</parameter></function></tool_call>      Qwen3-Coder
    llama      {"name": "add", "parameters": {"a": 1}}, perhaps after <|python_tag|>      Llama 3
    mistral    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or [TOOL_CALLS]add{"a": 1}

Rules kept here: whatever the model wrote, nothing raises, and the time that reading takes grows with its length alone:
no pattern here may try the same space twice. Arguments that are not JSON, NaN among them, are passed on as they were
written, as OpenAI's API has it: the harness says to the model what is wrong with them. A call without a name is text.
Calls whose arguments nest deeper than any tool's are text too, and halves of characters are marks: libraries that
harnesses read arguments with break on them, and the episode would fail for what the policy wrote.
Whether a tool exists is the harness's to say.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

ToolFamily = Literal["hermes", "xml", "llama", "mistral"]
"""tool_syntax.py finds out which one a template has, and how others write calls."""

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NAME = re.compile(r"""["']?name["']?\s*:\s*["']([^"']+)["']""")
_ARGUMENTS = re.compile(r"""["']?(?:arguments|parameters)["']?\s*:\s*(.*)\Z""", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_CALL = re.compile(r"([A-Za-z_][\w.-]*)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\]\s*)?(\{.*)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_THOUGHT = "</think>"
_HALF = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\.")
"""Pairs of halves, which stay; halves of characters; other escapes, which stay."""
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_MAX_DEPTH = 64
_MAX_CALLS = 128


class WrittenCall(NamedTuple):
    name: str
    arguments: str
    """As JSON, if that is what the model wrote."""


class WrittenAnswer(NamedTuple):
    content: str
    calls: list[WrittenCall]


def family_of(template: str) -> ToolFamily | None:
    """Return how a model with this chat template writes tool calls; None where it is not known."""
    if "<tool_call>" in template:
        return "xml" if "<function=" in template else "hermes"
    if _MISTRAL in template:
        return "mistral"
    if _PYTHON_TAG in template or "<|eom_id|>" in template or '"parameters": ' in template:
        return "llama"
    return None


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    found = [at for at in map(text.find, stops) if at >= 0]
    return text[: min(found)] if found else text


def whole_text(text: str) -> str:
    """Return the text with a mark in place of each half of a character: JSON can write them, UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _HALF.search(text) else text


def read_answer(
    text: str, family: "ToolFamily | Callable[[str], WrittenAnswer]", tools: Sequence[Mapping[str, Any]] = ()
) -> WrittenAnswer:
    """Return what a model wrote as text and tool calls. `text` has its special tokens.

    `tools` are those of the request: XML says nothing of a value's type, and their schemas do.
    """
    thought, mark, rest = text.rpartition(_THOUGHT)
    if family == "xml":
        found = _xml(rest, _texts_of(tools))
    elif callable(family):
        found = family(rest)
    else:
        found = _READERS[family](rest)
    calls = [whole_call(call) for call in found.calls[:_MAX_CALLS]]
    if any(is_deep(call.arguments) for call in calls):
        return WrittenAnswer(text, [])
    return WrittenAnswer(thought + mark + found.content if mark else found.content, calls)


def whole_call(call: WrittenCall) -> WrittenCall:
    """Return a call without halves of characters, be they written or escaped."""
    return WrittenCall(whole_text(call.name), whole_text(_ESCAPE.sub(_mark_half, call.arguments)))


def _mark_half(found: "re.Match[str]") -> str:
    is_half = len(found[0]) == len(r"\ud800")
    return "\ufffd" if is_half else found[0]


def is_deep(arguments: str) -> bool:
    """Return whether arguments, be they JSON or not, nest deeper than any tool's do."""
    depth = 0
    for bracket in _BRACKET.finditer(_JSON_TEXT.sub("", arguments)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > _MAX_DEPTH:
            return True
    return False


def _hermes(text: str) -> WrittenAnswer:
    return _blocks(text, lambda block: json_calls(block, several=False))


def _xml(text: str, texts: set[tuple[str, str]]) -> WrittenAnswer:
    def value(name: str, parameter: str, written: str) -> object:
        if (name, parameter) in texts:
            return written
        try:
            return _read_json(written)
        except (ValueError, RecursionError):
            return written

    def calls(block: str) -> list[WrittenCall]:
        found: list[WrittenCall] = []
        for name, body in _FUNCTION.findall(block):
            written = dict(_PARAMETER.findall(body))
            try:
                arguments = _dump({one: value(name.strip(), one, text) for one, text in written.items()})
            except RecursionError:
                arguments = _dump(written)
            found.append(WrittenCall(name.strip(), arguments))
        return found or json_calls(block, several=False)

    return _blocks(text, calls)


def _texts_of(tools: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Return the parameters that are texts, each with its tool's name."""
    found: set[tuple[str, str]] = set()
    for tool in tools:
        function = tool.get("function")
        function = function if isinstance(function, dict) else {}
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        for name, kind in properties.items() if isinstance(properties, dict) else ():
            if isinstance(kind, dict) and kind.get("type") == "string":
                found.add((str(function.get("name")), name))
    return found


def _blocks(text: str, read: Callable[[str], list[WrittenCall]]) -> WrittenAnswer:
    """Read each `<tool_call>` block. A block without a call stays in the text."""
    calls: list[WrittenCall] = []
    kept: list[str] = []
    end = 0
    for block in _BLOCK.finditer(text):
        found = read(block[1])
        if found:
            kept.append(text[end : block.start()])
            end = block.end()
            calls += found
    kept.append(text[end:])
    return WrittenAnswer("".join(kept).strip() if calls else text, calls)


def _llama(text: str) -> WrittenAnswer:
    bare = text.strip()
    is_marked = bare.startswith(_PYTHON_TAG)
    bare = bare.removeprefix(_PYTHON_TAG).strip()
    if not is_marked and not bare.startswith("{"):
        return WrittenAnswer(text, [])
    calls = json_calls(bare, several=True)
    return WrittenAnswer("", calls) if calls else WrittenAnswer(text, [])


def _mistral(text: str) -> WrittenAnswer:
    before, mark, rest = text.partition(_MISTRAL)
    if not mark:
        return WrittenAnswer(text, [])
    if rest.lstrip().startswith("["):
        calls = json_calls(rest, several=True)
    else:
        found = [_MISTRAL_CALL.fullmatch(part.strip()) for part in rest.split(_MISTRAL)]
        calls = [WrittenCall(one[1], one[2].strip()) for one in found if one is not None]
    return WrittenAnswer(before.strip(), calls) if calls else WrittenAnswer(text, [])


_READERS: Mapping[ToolFamily, Callable[[str], WrittenAnswer]] = {
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
}


def json_calls(text: str, *, several: bool) -> list[WrittenCall]:
    """Read calls written as JSON: an object, a list of objects, or objects with semicolons between them."""
    text = text.strip()
    try:
        values = [_read_json(text)]
    except (ValueError, RecursionError):
        parts = re.split(r";\s*(?=\{)", text) if several else [text]
        if len(parts) > 1:
            return [call for part in parts for call in json_calls(part, several=False)]
        return _damaged_call(text)
    if isinstance(values[0], list):
        values = values[0]
    try:
        return [call for value in values if (call := _call(value)) is not None]
    except RecursionError:
        return _damaged_call(text)


def _call(value: object) -> WrittenCall | None:
    if not isinstance(value, dict):
        return None
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None
    given = value.get("arguments", value.get("parameters", {}))
    return WrittenCall(name, given if isinstance(given, str) else _dump(given))


def _damaged_call(text: str) -> list[WrittenCall]:
    """Read a call whose JSON is broken: its name, and its arguments as they were written. Of a list, the first."""
    if text.startswith("["):
        text = text[1:].removesuffix("]").strip()
    name = _NAME.search(text)
    if name is None or not text.startswith("{"):
        return []
    rest = _ARGUMENTS.search(text)
    arguments = "" if rest is None else rest[1].strip()
    if arguments.endswith("}}"):
        arguments = arguments[:-1]
    return [WrittenCall(name[1], arguments)]


def _read_json(text: str) -> Any:
    """Raises ValueError, also for numbers that JSON has no word for: Python would write them as Infinity."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError(f"{written[:40]} is no number of JSON")
    return value


def _dump(value: object) -> str:
    """Raises RecursionError for what was read at a lesser depth of calls."""
    return json.dumps(value, ensure_ascii=False)
