"""How a model writes tool calls, found out from templates of many families: each is a short form of a published one."""

import time

import pytest

from polyrl.data.chat_template import ChatTemplate
from polyrl.hosts.tool_syntax import MarkedCalls, MarkedJson, find_syntax, read_calls
from polyrl.hosts.tools import WrittenAnswer, WrittenCall

NAME, GIVEN = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"


def template(call: str, *, before: str = "", between: str = "", after: str = "") -> str:
    """A template that writes a call so, and this around and between several."""
    calls = f"{{% for c in m.tool_calls %}}{call}{{{{ '{between}' if not loop.last }}}}{{% endfor %}}"
    return (
        "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        f"{{% if m.tool_calls %}}{before}{calls}{after}{{% endif %}}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


AS_JSON = f'{{"name": "{NAME}", "arguments": {GIVEN}}}'
HERMES_LIKE = template(f"\n<tool_call>\n{AS_JSON}\n</tool_call>")
LLAMA_LIKE = template(
    f'{{"name": "{NAME}", "parameters": {GIVEN}}}',
    before="{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}",
)
MISTRAL_LIKE = template(AS_JSON, before="[TOOL_CALLS] [", between=", ", after="]")
EACH = "{% for k, v in c.function.arguments.items() %}"
PARAMETERS = EACH + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
XML = template(f"<tool_call>\n<function={NAME}>\n{PARAMETERS}</function>\n</tool_call>", between="\\n")
LIST_AFTER_A_MARK = template(AS_JSON, before="<|tool_call|>[", between=", ", after="]<|/tool_call|>")
MARKS_AROUND_EACH = template(
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{GIVEN}\n```<｜tool▁call▁end｜>",
    before="<｜tool▁calls▁begin｜>",
    between="\\n",
    after="<｜tool▁calls▁end｜>",
)
WITHOUT_MARKS = template(f"{NAME}\n{GIVEN}")
PAIRS = EACH + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>{% endfor %}"
KEYS_AND_VALUES = template(f"<tool_call>{NAME}\n{PAIRS}\n</tool_call>")
BEGIN = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
FIRST, END, LAST = f"<｜tool▁calls▁begin｜>{BEGIN}", "\n```<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
JSON = '{"name": "add", "arguments": {"a": 1}}'
ADD = WrittenCall("add", '{"a": 1}')


@pytest.mark.parametrize(
    ("source", "expected"),
    [(HERMES_LIKE, "hermes"), (LLAMA_LIKE, "llama"), (MISTRAL_LIKE, "mistral"), (XML, "xml")],
    ids=["hermes", "llama", "mistral", "xml"],
)
def test_a_family_is_taken_that_reads_the_calls_of_its_template(source: str, expected: str):
    assert find_syntax(ChatTemplate(source, {})) == expected


@pytest.mark.parametrize(
    ("source", "said", "expected"),
    [
        (
            LIST_AFTER_A_MARK,
            f"hm <|tool_call|>[{JSON}, {JSON}]<|/tool_call|>",
            WrittenAnswer("hm", [ADD, ADD]),
        ),
        (LIST_AFTER_A_MARK, '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}', WrittenAnswer("", [ADD])),
        (
            LIST_AFTER_A_MARK,
            '<|tool_call|>[{"name": "add", "arguments": {"a": }}]',
            WrittenAnswer("", [WrittenCall("add", '{"a": }')]),
        ),
        (LIST_AFTER_A_MARK, '[{"name": "add", "arguments": {}}]', None),
        (
            MARKS_AROUND_EACH,
            f'{FIRST}{{"a": 1}}{END}\n{BEGIN}{{"a": 1}}{END}{LAST}',
            WrittenAnswer("", [ADD, ADD]),
        ),
        (
            MARKS_AROUND_EACH,
            f'<think>x</think>so{FIRST}{{"a": }}',
            WrittenAnswer("<think>x</think>so", [WrittenCall("add", '{"a": }')]),
        ),
        (MARKS_AROUND_EACH, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', None),
    ],
)
def test_another_syntax_is_found_by_what_the_template_writes(source: str, said: str, expected: WrittenAnswer | None):
    syntax = find_syntax(ChatTemplate(source, {}))
    assert isinstance(syntax, MarkedJson | MarkedCalls)
    assert read_calls(said, syntax, []) == (WrittenAnswer(said, []) if expected is None else expected)


@pytest.mark.parametrize("source", [WITHOUT_MARKS, KEYS_AND_VALUES], ids=["no marks", "no JSON"])
def test_a_syntax_that_text_could_be_taken_for_or_that_nothing_here_reads_is_none(source: str):
    assert find_syntax(ChatTemplate(source, {})) is None


def test_a_template_that_shows_no_calls_has_the_family_of_its_marks():
    silent = "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert find_syntax(ChatTemplate(silent + "{# <tool_call> #}", {})) == "hermes"
    assert find_syntax(ChatTemplate(silent, {})) is None


@pytest.mark.parametrize("inside", [FIRST, "a" * 300, " ", "`"])
def test_a_long_answer_without_sense_is_read_in_no_time(inside: str):
    syntax = find_syntax(ChatTemplate(MARKS_AROUND_EACH, {}))
    assert syntax is not None
    began = time.process_time()
    read_calls(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>" + inside * (200_000 // len(inside)),
        syntax,
        [],
    )
    assert time.process_time() - began < 2.0
