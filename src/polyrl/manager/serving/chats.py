"""Chats of OpenAI's clients, rendered with the model's own template (data/chat_template.py).

Rules kept here: a template may write an option once for each message, so options are small, and the model's special
tokens are none: a text of megabytes in place of one became gigabytes.
"""

from typing import Any

import msgspec

from polyrl.data.chat_template import ChatTemplate, TemplateRefused
from polyrl.errors import shorten
from polyrl.manager.serving.requests import wrong

_OURS = ("messages", "tools", "documents")
_SPECIAL = "_token"
"""The end of the names of special tokens, which are the model's own."""
_MAX_BYTES = 1 << 14


def render_chat(template: ChatTemplate, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Return the text up to where the answer begins. Raises AskError for messages that the template refuses."""
    for name in options:
        if name in _OURS or name.endswith(_SPECIAL):
            raise wrong("chat_template_kwargs", f"{shorten(name)} is not among what a template may be given here")
    if (num_bytes := len(msgspec.json.encode(options))) > _MAX_BYTES:
        raise wrong("chat_template_kwargs", f"{num_bytes} bytes, expected at most {_MAX_BYTES}")
    try:
        return template.render(messages, options)
    except TemplateRefused as error:
        raise wrong("messages", f"the model's chat template refuses them: {error}") from error
