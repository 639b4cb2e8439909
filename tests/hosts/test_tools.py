"""Tool calls in what models write, good and bad."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.hosts.tools import ToolFamily, WrittenAnswer, WrittenCall, before_stop, family_of, read_answer

FAMILIES: list[ToolFamily] = ["hermes", "xml", "llama", "mistral"]
ADD = WrittenCall("add", '{"a": 1}')


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (
            "hermes",
            'so: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            WrittenAnswer("so:", [ADD]),
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', WrittenAnswer("", [ADD])),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 2, WrittenAnswer("", [ADD, ADD])),
        ("hermes", "<think><tool_call></think>hello", WrittenAnswer("<think><tool_call></think>hello", [])),
        ("hermes", '<tool_call>{"name": "nobody"}</tool_call>', WrittenAnswer("", [WrittenCall("nobody", "{}")])),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": "x"}</tool_call>',
            WrittenAnswer("", [WrittenCall("add", "x")]),
        ),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>',
            WrittenAnswer("", [WrittenCall("add", '{"a": }')]),
        ),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            WrittenAnswer("", [WrittenCall("add", "[1]")]),
        ),
        ("hermes", "<tool_call>add(1)</tool_call>", WrittenAnswer("<tool_call>add(1)</tool_call>", [])),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', WrittenAnswer('<tool_call>{"name": 3}</tool_call>', [])),
        (
            "xml",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            WrittenAnswer("", [ADD]),
        ),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', WrittenAnswer("", [ADD])),
        (
            "llama",
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
            WrittenAnswer("", [ADD, ADD]),
        ),
        ("llama", "it is {3}", WrittenAnswer("it is {3}", [])),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', WrittenAnswer("", [ADD])),
        ("mistral", 'well [TOOL_CALLS]add{"a": 1}', WrittenAnswer("well", [ADD])),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}', WrittenAnswer("", [ADD, ADD])),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": }}]',
            WrittenAnswer("", [WrittenCall("add", '{"a": }')]),
        ),
    ],
)
def test_calls_are_read_as_the_family_writes_them_and_bad_ones_are_passed_on(
    family: ToolFamily, text: str, expected: WrittenAnswer
):
    assert read_answer(text, family) == expected


def test_a_text_parameter_of_an_xml_call_stays_text_where_the_tool_says_so():
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    said = "<tool_call><function=add><parameter=a>1</parameter><parameter=b>1</parameter></function></tool_call>"
    assert json.loads(read_answer(said, "xml", tools).calls[0].arguments) == {"a": "1", "b": 1}


@given(
    text=st.text(max_size=60), inside=st.sampled_from(["<tool_call>", "[TOOL_CALLS]", "{", '{"name":', "<function=a>"])
)
def test_whatever_a_model_writes_nothing_raises(text: str, inside: str):
    for family in FAMILIES:
        read_answer(inside + text, family)
        read_answer(text + inside + text, family)


def test_a_deeply_nested_answer_is_text():
    said = "<tool_call>" + "[" * 100_000
    assert read_answer(said, "hermes") == WrittenAnswer(said, [])


def test_the_family_is_known_from_the_template():
    assert family_of("... <tool_call> ...") == "hermes"
    assert family_of("<tool_call> <function=") == "xml"
    assert family_of("[TOOL_CALLS]") == "mistral"
    assert family_of("<|python_tag|>") == "llama"
    assert family_of("{{ messages }}") is None


def test_a_text_ends_before_its_first_stop_string():
    assert before_stop("a\nb;c", (";", "\n")) == "a"
    assert before_stop("abc", ()) == "abc"


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("mistral", "[TOOL_CALLS]a" + " " * 4000 + "x"),
        ("xml", "<tool_call>" + "<function=" * 20_000),
        ("xml", "<tool_call><function=a>" + "<parameter=" * 20_000),
        ("hermes", '<tool_call>{"name"' + " " * 40_000),
        ("llama", "{" + ";" * 40_000 + " " * 40_000),
        ("mistral", '[TOOL_CALLS]a{"' + '\\"' * 100_000),
        ("mistral", "[TOOL_CALLS]a{" + "[]" * 100_000 + "\\u" * 100_000),
    ],
)
def test_a_long_answer_without_sense_is_read_in_no_time(family: ToolFamily, said: str):
    """The first of these took two minutes, in which the host said nothing to anybody."""
    began = time.process_time()
    read_answer(said, family)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("family", ["hermes", "xml"])
def test_halves_of_characters_in_a_call_can_be_sent_on(family: ToolFamily):
    said = '<tool_call>{"name": "add\\ud800", "arguments": {"a": "\\udfff", "b": "\\ud83d\\ude00"}}</tool_call>'
    (call,) = read_answer(said, family).calls
    assert call.name == "add\ufffd"
    assert json.loads(call.arguments.encode()) == {"a": "\ufffd", "b": "\U0001f600"}


def test_halves_of_characters_in_arguments_as_they_were_written_are_marks_and_other_escapes_stay():
    said = r'[TOOL_CALLS]add{"a": "\ud800", "b": "\\ud800\ud83d\ude00\n", "c": "\uDC00\ud83d"}'
    (call,) = read_answer(said, "mistral").calls
    assert json.loads(call.arguments) == {"a": "\ufffd", "b": "\\ud800\U0001f600\n", "c": "\ufffd\ufffd"}


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity", "9" * 5000])
def test_numbers_that_are_none_in_json_are_passed_on_as_they_were_written(number: str):
    (call,) = read_answer(f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>', "hermes").calls
    assert call == WrittenCall("add", f'{{"a": {number}}}')
    (call,) = read_answer(f"<tool_call><function=add><parameter=a>{number}</parameter></function></tool_call>", "xml")[
        1
    ]
    assert json.loads(call.arguments) == {"a": number}


@pytest.mark.parametrize("depth", [65, 1000, 100_000])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_call_whose_arguments_nest_deeper_than_any_tools_is_text(depth: int, is_closed: bool):
    nested = "[" * depth + "]" * depth * is_closed
    hermes = f'<tool_call>{{"name": "f", "arguments": {nested}}}</tool_call>'
    mistral = f'[TOOL_CALLS]f{{"a": {nested}}}'
    assert read_answer(hermes, "hermes") == WrittenAnswer(hermes, [])
    assert read_answer(mistral, "mistral") == WrittenAnswer(mistral, [])
    shallow = json.dumps({"code": nested + '"' + nested})
    (call,) = read_answer(f"[TOOL_CALLS]f{shallow}", "mistral").calls
    assert call.arguments == shallow


def test_a_call_that_nests_as_deep_as_can_be_read_does_not_raise():
    for depth in range(900, 1010):
        nested = '{"a":' * depth + "1" + "}" * depth
        read_answer(f'<tool_call>{{"name": "f", "arguments": {nested}}}</tool_call>', "hermes")
        read_answer(f"<tool_call><function=f><parameter=a>{nested}</parameter></function></tool_call>", "xml")
