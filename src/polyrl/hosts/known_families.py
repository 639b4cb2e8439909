"""Families of chat models that the package `renderers` knows: it renders the next turn without the template.

Rules kept here: the package is used where it is installed, and only after a conversation that it renders to the same
tokens as the model's own template does. Whatever it raises, the template's difference is taken instead (chats.py).
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

_PROBE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
]


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
        specs = None if tools is None else [one.get("function", one) for one in tools]
        try:
            renderer = self.renderer(options)
            found = None if renderer is None else renderer.bridge_to_next_turn(prompt, drawn, new, tools=specs)
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
            assert self._text.template is not None
            expected = self._text.encode(self._text.template.render(_PROBE, dict(options)))
            is_same = list(made.render_ids(_PROBE, add_generation_prompt=True)) == expected
            self._renderers[key] = made if is_same else None
        return self._renderers[key]


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
    chosen = name or _name_of(Path(folder), base.MODEL_RENDERER_MAP)
    if not chosen or text.template is None:
        return None
    try:
        family = KnownFamily(chosen, base.load_tokenizer(str(folder)), text)
        is_same = family.renderer({}) is not None
    except Exception as error:
        if name:
            raise UserError(f"renderer {name}: {one_line(error)}") from error
        return None
    if name and not is_same:
        raise UserError(f"renderer {name}: renders another prompt than the chat template of {folder}")
    return family if is_same else None


def _name_of(folder: Path, known: dict[str, str]) -> str:
    """Return the renderer of the model's name: as its config.json has it, or its folder."""
    said = read_or_nothing(folder, "config.json").get("_name_or_path")
    names = [said if isinstance(said, str) else "", folder.resolve().name]
    by_last = {model.rpartition("/")[2].lower(): renderer for model, renderer in known.items()}
    for one in names:
        found = by_last.get(one.rpartition("/")[2].lower())
        if found is not None:
            return found
    return ""
