"""Chats as the model's template writes them: the same text as transformers' `apply_chat_template`, to the letter."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.serving import CHATML, save_tokenizer
from transformers import AutoTokenizer

from polyrl.errors import UserError
from polyrl.manager.serving.requests import AskError
from polyrl.manager.serving.texts import load

LLAMA = (
    "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}\n    {%- set system = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
    "{{- '<|im_start|>system\\n' + system + '\\n' + strftime_now('%Y') }}\n"
    "{%- for message in messages %}\n  {%- if message.role not in ['user', 'assistant'] %}\n"
    "    {{- raise_exception('no ' + message.role) }}\n  {%- endif %}\n"
    "  {{- '<|im_start|>' + message.role + '\\n' }}{% generation %}{{ message.content | trim }}{% endgeneration %}\n"
    "  {%- if loop.last and message.role == 'assistant' %}{% break %}{% endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{{ m | tojson }}\n{% endfor %}"
    "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.role %}{% endfor %}{{ ns.last }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "2 < 3 & \"so\" 'on' €"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hi\n\n"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", "name": "x"},
        {"role": "user", "content": "<b>?</b>"},
    ],
]


@pytest.mark.parametrize("template", [CHATML, LLAMA, THINKING], ids=["chatml", "llama", "thinking"])
def test_a_chat_becomes_the_tokens_that_transformers_makes_of_it(tmp_path: Path, template: str):
    folder = save_tokenizer(tmp_path / "model", template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.save_pretrained(folder)
    model = load(folder).text
    for chat in CHATS:
        for options in ({}, {"enable_thinking": False}):
            expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **options)
            assert asyncio.run(model.chat_tokens(chat, options)) == expected


def test_a_plain_text_becomes_the_tokens_that_transformers_makes_of_it(tmp_path: Path):
    folder = save_tokenizer(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("", "plain", "<|im_start|> €\n"):
        assert asyncio.run(load(folder).text.tokens(text)) == tokenizer(text)["input_ids"]


def test_what_a_template_refuses_is_told_in_its_own_words(tmp_path: Path):
    model = load(save_tokenizer(tmp_path / "model", LLAMA)).text
    with pytest.raises(AskError, match="no tool"):
        asyncio.run(model.chat_tokens([{"role": "tool", "content": "x"}], {}))


@pytest.mark.parametrize(
    "way_out", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ self.__init__.__globals__ }}"]
)
def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, way_out: str):
    model = load(save_tokenizer(tmp_path / "model", way_out)).text
    with pytest.raises(AskError, match="the model's chat template refuses them"):
        asyncio.run(model.chat_tokens(CHATS[0], {}))


@pytest.mark.parametrize("name", ["messages", "tools", "documents"])
def test_what_we_give_a_template_nobody_else_does(tmp_path: Path, name: str):
    model = load(save_tokenizer(tmp_path / "model")).text
    with pytest.raises(AskError, match=f"chat_template_kwargs: {name} is not") as caught:
        asyncio.run(model.chat_tokens(CHATS[0], {name: []}))
    assert caught.value.param == "chat_template_kwargs"


def test_a_template_without_end_is_refused_as_any_other(tmp_path: Path):
    model = load(save_tokenizer(tmp_path / "model", "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}")).text
    with pytest.raises(AskError, match="the model's chat template refuses them: maximum recursion"):
        asyncio.run(model.chat_tokens(CHATS[0], {}))


def test_everybody_else_goes_on_while_a_long_text_becomes_tokens(tmp_path: Path):
    """The tokenizer's plain `encode` holds the interpreter's lock for seconds: workers were cut off meanwhile."""
    model = load(save_tokenizer(tmp_path / "model")).text

    async def turns_of_others() -> int:
        tokens = asyncio.create_task(model.tokens("a" * 2_000_000))
        num = 0
        while not tokens.done():
            await asyncio.sleep(0.001)
            num += 1
        assert len(await tokens) == 2_000_000
        return num

    assert asyncio.run(turns_of_others()) > 10


def test_a_model_without_a_template_has_no_chats(tmp_path: Path):
    model = load(save_tokenizer(tmp_path / "model", None)).text
    with pytest.raises(AskError, match="no chat template"):
        asyncio.run(model.chat_tokens(CHATS[0], {}))


def test_a_directory_that_cannot_be_served_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=r"no tokenizer\.json there"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        load(tmp_path)
    folder = save_tokenizer(tmp_path / "model", "{% if %}")
    with pytest.raises(UserError, match="its chat template cannot be used"):
        load(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="its chat template cannot be used"):
        load(folder)
