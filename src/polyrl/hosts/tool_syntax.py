"""How a model writes tool calls, found out from its chat template: what the template writes for a call is read again.

A family that is known by its marks (tools.py) is taken if it reads the template's own call. Otherwise the difference
between an answer with a call and one without says what stands around a call:

    MARK JSON                     <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]
    MARK NAME between JSON END    <tool_begin>function<sep>add\\n{"a": 1}<tool_end>

Rules kept here: a syntax is taken only if it reads one call of the template, and two where the template writes two.
Without marks around a call, text could be taken for one: such a syntax is none. Arguments that are not JSON are passed
on as they were written. The time that reading takes grows with the text's length alone.
"""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrl.hosts.tools import ToolFamily, WrittenAnswer, WrittenCall, family_of, json_calls, read_answer

if TYPE_CHECKING:
    from polyrl.data.chat_template import ChatTemplate

_USER = {"role": "user", "content": "hello"}
_SAID = "polyrl said"
_NAMES = ("polyrl_probe", "polyrl_other")
_GIVEN = {"polyrl_key": "polyrl value"}
_NAME = r"([\w.:-]{1,256}?)"
_MARKED = re.compile(r"[<\[|｜]")
PROBES: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {"polyrl_key": {"type": "string"}}},
        },
    }
    for name in _NAMES
]


class MarkedJson(NamedTuple):
    """JSON after a mark, as far as what ends it: an object, or a list of them."""

    mark: str
    end: str

    def read(self, text: str) -> WrittenAnswer:
        before, mark, rest = text.partition(self.mark)
        written = rest.partition(self.end)[0] if self.end else rest
        calls = json_calls(written, several=True) if mark else []
        return WrittenAnswer(before.strip(), calls) if calls else WrittenAnswer(text, [])


class MarkedCalls(NamedTuple):
    """A mark, a name, and arguments as far as the next mark, for each call."""

    pattern: "re.Pattern[str]"

    def read(self, text: str) -> WrittenAnswer:
        found = list(self.pattern.finditer(text))
        calls = [WrittenCall(one[1], one[2].strip()) for one in found]
        return WrittenAnswer(text[: found[0].start()].strip(), calls) if found else WrittenAnswer(text, [])


ToolSyntax = ToolFamily | MarkedJson | MarkedCalls


def find_syntax(template: "ChatTemplate") -> ToolSyntax | None:
    """Return how to read this template's calls; None where that is not known, or not safe."""
    known = family_of(template.source)
    one, two = _written(template, _NAMES[:1]), _written(template, _NAMES)
    if one is None:
        return known  # it shows no calls: what the model was taught is the makers' word
    if two is not None and _NAMES[1] not in two:
        two = None  # it writes the first call alone
    candidates: list[ToolSyntax | None] = [known, _marked_json(one), _marked_calls(one, two)]
    return next((each for each in candidates if each is not None and _reads(each, one, two)), None)


def read_calls(text: str, syntax: ToolSyntax, tools: Sequence[dict[str, Any]]) -> WrittenAnswer:
    """Return what a model wrote as text and tool calls. `text` has its special tokens."""
    return read_answer(text, syntax if isinstance(syntax, str) else syntax.read, tools)


def takes_arguments_as_text(template: "ChatTemplate") -> bool:
    """Return whether the template writes calls whose arguments are text, and none whose arguments are an object."""
    return _written_with(template, _NAMES[:1], _GIVEN) is None and (
        _written_with(template, _NAMES[:1], json.dumps(_GIVEN)) is not None
    )


def writes_calls(template: "ChatTemplate") -> bool:
    """Return whether the template writes an answer with a call at all."""
    return _written(template, _NAMES[:1]) is not None


def writes_answer(template: "ChatTemplate", answer: dict[str, Any]) -> bool:
    """Return whether the template writes this answer. Those that write each argument by itself refuse arguments that
    are no object, and some refuse a second call."""
    from polyrl.data.chat_template import TemplateRefused

    try:
        template.render([_USER, answer], {}, tools=PROBES, with_answer_begun=False)
    except TemplateRefused:
        return False
    return True


def _written(template: "ChatTemplate", names: Sequence[str]) -> str | None:
    """Return what the template writes for an answer with these calls, without its end; None if it shows none."""
    found = _written_with(template, names, _GIVEN)
    return _written_with(template, names, json.dumps(_GIVEN)) if found is None else found


def _written_with(template: "ChatTemplate", names: Sequence[str], arguments: object) -> str | None:
    from polyrl.data.chat_template import TemplateRefused

    calls = [
        {"id": f"polyrl00{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, name in enumerate(names)
    ]
    try:
        begun = template.render([_USER], {}, tools=PROBES)
        given = template.render([_USER], {}, tools=PROBES, with_answer_begun=False)
        said = template.render(
            [_USER, {"role": "assistant", "content": _SAID}], {}, tools=PROBES, with_answer_begun=False
        )
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        whole = template.render([_USER, answer], {}, tools=PROBES, with_answer_begun=False)
    except TemplateRefused:
        return None
    start = next((each for each in (begun, given) if whole.startswith(each)), None)
    if start is None or "polyrl_key" not in whole[len(start) :]:
        return None
    return whole[len(start) :].removesuffix(said.rpartition(_SAID)[2])


def _marked_json(one: str) -> MarkedJson | None:
    at = re.search(r"[\[{]\s*[\[{]?\s*\"", one)
    mark = one[: at.start()].strip() if at else ""
    if at is None or not _MARKED.search(mark):
        return None
    try:
        end = json.JSONDecoder().raw_decode(one, at.start())[1]
    except ValueError:
        return None
    return MarkedJson(mark, one[end:].strip())


def _marked_calls(one: str, two: str | None) -> MarkedCalls | None:
    written = next(
        (text for text in (json.dumps(_GIVEN), json.dumps(_GIVEN, separators=(",", ":"))) if text in one), ""
    )
    before, name, rest = one.partition(_NAMES[0])
    between, given, end = rest.partition(written) if written else ("", "", "")
    if not (name and given and _MARKED.search(before)):
        return None
    marks, ends = [before.strip()], [end.strip()]
    if two is not None:
        further = two.partition(written)[2].partition(_NAMES[1])[0].strip()
        marks.append(further)
        ends.append(further)
    last = "|".join([re.escape(each) for each in ends if each] + [r"\Z"])
    first = "|".join(re.escape(each) for each in marks if each)
    middle = re.escape(between.strip()) or r"(?=\{)"
    return MarkedCalls(re.compile(rf"(?:{first})\s*{_NAME}\s*{middle}(.*?)(?={last})", re.DOTALL))


def _reads(syntax: ToolSyntax, one: str, two: str | None) -> bool:
    return _names(syntax, one) == [_NAMES[0]] and (two is None or _names(syntax, two) == list(_NAMES))


def _names(syntax: ToolSyntax, written: str) -> list[str]:
    """Return the names of the calls that are read; none if what they are given is not what was written."""
    found = read_calls(written, syntax, PROBES).calls
    try:
        return [each.name for each in found if json.loads(each.arguments) == _GIVEN]
    except ValueError:
        return []
