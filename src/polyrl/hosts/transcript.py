"""The transcript of one episode, as the tokens of its next prompt, for environments that a host plays itself.

With a chat template it is a chat (chats.py). Without one, as for a small model of characters, texts are put together:
the tokens of what was said and of what was drawn, in order, and the token that ended an answer stays where it was.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from polyrl.hosts.episode import CallLimits, DrawnAnswer, EpisodeFailed
from polyrl.hosts.known_families import KnownFamily
from polyrl.hosts.replies import message_of
from polyrl.hosts.texts import ChatRefused, ModelText
from polyrl.hosts.tools import before_stop


class Transcript:
    """`say`, `prompt`, `hear`, and again."""

    def __init__(
        self,
        text: ModelText,
        *,
        family: KnownFamily | None = None,
        tools: Sequence[dict[str, Any]] = (),
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._text = text
        self._chat_options = dict(chat_options or {})
        self._tools = list(tools)
        self._tokens: list[int] = []
        self._unsaid = ""
        self._chat = self._last = None
        self.messages: list[dict[str, Any]] = []
        if text.template is not None:
            from polyrl.hosts.chats import Chat

            self._chat = Chat(text, family)

    def say(self, messages: Sequence[dict[str, Any]]) -> None:
        self.messages += messages
        self._unsaid += "".join(message["content"] for message in messages)

    async def prompt(self) -> list[int]:
        """Return the tokens of the next call. Raises NoRoom, and EpisodeFailed where the template refuses."""
        return await self._text.in_thread(self._prompt)

    def _prompt(self) -> list[int]:
        if self._chat is not None:
            try:
                self._last = self._chat.prompt(self.messages, self._tools or None, self._chat_options)
            except ChatRefused as error:
                raise EpisodeFailed(str(error)) from error
            return self._last.tokens
        if self._unsaid:
            self._tokens += self._text.encode(self._unsaid, special=not self._tokens)
            self._unsaid = ""
        return self._tokens

    def hear(self, drawn: DrawnAnswer, limits: CallLimits) -> str:
        """Take the answer in, and return its text: up to a stop string, without the end token."""
        shown = self._text.decode(self._text.content(drawn), special=bool(self._tools))
        text = before_stop(shown, limits.stop)
        message = message_of(text, [])
        if self._chat is not None and self._last is not None:
            self._chat.record(self._last, drawn, message)
        else:
            self._tokens = [*self._tokens, *drawn.tokens]
        self.messages.append(message)
        return text
