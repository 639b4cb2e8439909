"""Families of chat models that the package `renderers` knows: it renders the next turn without the template.

Rules kept here: the package is used where it is installed, and only if it renders several conversations, with thoughts
and with tools, to the same tokens as the model's own template does: two models of one name may differ there. It is
asked where the template's own difference gives no bridge (chats.py), and whatever it raises, there is none then.
"""

import importlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyrl.config.model_dir import read_or_nothing
from polyrl.errors import UserError, one_line
from polyrl.hosts.texts import ModelText

log = logging.getLogger(__name__)

_CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
_ASKED: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
_PROBES: list[tuple[list[dict[str, Any]], dict[str, Any] | None]] = [
    (_ASKED, None),
    ([*_ASKED, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n5"}, {"role": "user", "content": "?"}], None),
    (_ASKED, _TOOL),
    (
        [
            *_ASKED,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ],
        _TOOL,
    ),
]
"""Conversations, and a tool: families that differ do so in thoughts and in tools."""


class KnownFamily:
    """A renderer of the package, for one model directory; and one more for each setting of the chat template."""

    def __init__(self, name: str, tokenizer: Any, text: ModelText) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._text = text
        self._renderers: dict[str, Any] = {}

    def bridge(
        self,
        prompt: list[int],
        drawn: list[int],
        new: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> list[int] | None:
        """Return the next prompt, which goes on from `prompt` and `drawn`; None where the family has none."""
        try:
            renderer = self.renderer(options)
            found = None if renderer is None else renderer.bridge_to_next_turn(prompt, drawn, new, tools=tools)
        except Exception as error:  # noqa: BLE001  a package of others; the template's difference is there instead
            log.debug("renderers: %s", one_line(error))
            return None
        return None if found is None else list(found.token_ids)

    def renderer(self, options: Mapping[str, Any]) -> Any:
        """Return the package's renderer for these settings; None if it does not write what the template writes."""
        renderers = importlib.import_module("renderers")
        key = json.dumps(dict(options), sort_keys=True, default=str)
        if key not in self._renderers:
            config = renderers.config_from_name(self.name)
            made = renderers.create_renderer(self._tokenizer, config, chat_template_kwargs=dict(options) or None)
            is_same = all(self._agree(made, messages, tool, options) for messages, tool in _PROBES)
            self._renderers[key] = made if is_same else None
        return self._renderers[key]

    def _agree(
        self, made: Any, messages: list[dict[str, Any]], tool: dict[str, Any] | None, options: Mapping[str, Any]
    ) -> bool:
        assert self._text.template is not None
        tools = None if tool is None else [tool]
        written = self._text.template.render(messages, dict(options), tools=tools)
        return list(made.render_ids(messages, tools=tools, add_generation_prompt=True)) == self._text.encode(written)


def find_family(folder: str | Path, text: ModelText, name: str = "") -> KnownFamily | None:
    """Return the family of a model directory, if the package is there and knows it.

    `name` chooses one of the package's renderers; otherwise the model's name does. Raises UserError for a chosen one
    that cannot be used.
    """
    try:
        base = importlib.import_module("renderers.base")
    except ImportError as error:
        if name:
            raise UserError(f"renderer {name}: pip install renderers") from error
        return None
    if text.template is None:
        return None
    for chosen in [name] if name else _names_of(Path(folder), base.MODEL_RENDERER_MAP):
        try:
            family = KnownFamily(chosen, base.load_tokenizer(str(folder)), text)
            is_same = family.renderer({}) is not None
        except Exception as error:
            if name:
                raise UserError(f"renderer {name}: {one_line(error)}") from error
            continue
        if is_same:
            return family
    if name:
        raise UserError(f"renderer {name}: renders other prompts than the chat template of {folder}")
    return None


def _names_of(folder: Path, known: dict[str, str]) -> list[str]:
    """Return the renderers of models that are called as this one, in its config.json or by its folder."""
    said = read_or_nothing(folder, "config.json").get("_name_or_path")
    names = [said if isinstance(said, str) else "", folder.resolve().name]
    last = [one.rpartition("/")[2].lower() for one in names if one]
    found = [renderer for model, renderer in known.items() if model.rpartition("/")[2].lower() in last]
    return list(dict.fromkeys(found))
