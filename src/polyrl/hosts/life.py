"""A host from its options: the model's text, the front, the environment, and joining a manager with them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from polyrl.config.model_dir import read_facts
from polyrl.hosts.episode import PlayedEnvironment
from polyrl.hosts.front import HostFront
from polyrl.hosts.known_families import find_family
from polyrl.hosts.own import HostParts
from polyrl.hosts.registry import find_environment
from polyrl.hosts.texts import load_text

_ANY_CONTEXT = 1 << 20
"""Of a host without a model's directory: the manager bounds each call."""


class WantedEnvironment(NamedTuple):
    name: str
    args: Mapping[str, Any]
    model: str | None = None
    """The model's directory, for its tokenizer and chat template."""
    max_turns: int | None = None
    chat_options: Mapping[str, Any] = {}
    """Arguments of the chat template beside the messages, such as enable_thinking."""


@asynccontextmanager
async def opened(wanted: WantedEnvironment) -> AsyncIterator[PlayedEnvironment]:
    """Open an environment with its front started. Raises UserError for settings that cannot be used."""
    text = None if wanted.model is None else load_text(wanted.model)
    family = None if text is None or wanted.model is None else find_family(wanted.model, text)
    context = None if wanted.model is None else read_facts(wanted.model).max_context
    front = HostFront(
        max_context=_ANY_CONTEXT if context is None else context,
        text=text,
        family=family,
        chat_options=wanted.chat_options,
    )
    parts = HostParts(front, text, family, wanted.model or "", wanted.chat_options)
    environment = find_environment(wanted.name, wanted.args, parts, max_turns=wanted.max_turns)
    await front.start()
    try:
        yield environment
    finally:
        await front.close()
