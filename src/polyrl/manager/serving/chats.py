"""Chats of OpenAI's clients, rendered with the model's own template (data/chat_template.py)."""

from typing import Any

from polyrl.data.chat_template import ChatTemplate, TemplateRefused
from polyrl.manager.serving.requests import wrong

_OURS = ("messages", "tools", "documents")


def render_chat(template: ChatTemplate, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Return the text up to where the answer begins. Raises AskError for messages that the template refuses."""
    for name in _OURS:
        if name in options:
            raise wrong("chat_template_kwargs", f"{name} is not among what a template may be given here")
    try:
        return template.render(messages, options)
    except TemplateRefused as error:
        raise wrong("messages", f"the model's chat template refuses them: {error}") from error
