"""Chat templates: the model's own, rendered as transformers' `apply_chat_template` does.

Rules kept here: a template is a program by the makers of the model. It runs in Jinja's sandbox and reads the messages,
the tools and nothing else. A refusal is passed on in its own words.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from polyrl.config.model_dir import read_or_nothing
from polyrl.errors import PolyrlError, UserError

_TEMPLATE_FILE = "chat_template.jinja"
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of a template over messages that it was not made for."""


class TemplateRefused(PolyrlError):
    """The template does not render these messages. The message is the template's own reason, in one line."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text, for training. Here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  as Jinja has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        *,
        tools: list[dict[str, Any]] | None = None,
        with_answer_begun: bool = True,
    ) -> str:
        """Return the text, up to where the answer begins if `with_answer_begun`. Raises TemplateRefused."""
        ours = {"messages": messages, "tools": tools, "documents": None}
        begun = {"add_generation_prompt": with_answer_begun}
        try:
            return self._template.render({**begun, **self._special_tokens, **options, **ours})
        except _REFUSALS as error:
            raise TemplateRefused(" ".join(str(error).split())[:300]) from error


def load_template(folder: Path) -> ChatTemplate | None:
    """Return the template of a model's directory, if it has one. Raises UserError for one that cannot be used."""
    names = ("special_tokens_map.json", "tokenizer_config.json")
    config = {key: value for name in names for key, value in read_or_nothing(folder, name).items()}
    try:
        source = _source(folder, config)
        return None if source is None else ChatTemplate(source, _special_tokens(config))
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        raise UserError(f"{folder}: its chat template cannot be used: {error}") from error


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / _TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    said = config.get("chat_template")
    if isinstance(said, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in said if isinstance(one, dict)}
        said = named.get("default")
    return said if isinstance(said, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and so on, which templates use."""
    found: dict[str, str] = {}
    for name, said in config.items():
        text = said.get("content") if isinstance(said, dict) else said
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that Jinja's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
