"""Policies to play episodes with: answers that were written down, in place of a fleet."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.serving import CHATML, byte_tokenizer
from tokenizers import AddedToken

from polyrl.data.chat_template import ChatTemplate
from polyrl.hosts.episode import CallLimits, DrawnAnswer, Episode
from polyrl.hosts.texts import ModelText

IM_START, IM_END, END = 256, 257, 258
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<tool_call><|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_model(template: str | None = CHATML, max_context: int = 4096) -> ModelText:
    """A token a byte. `<|im_end|>` ends an answer."""
    made = None if template is None else ChatTemplate(template, {})
    return ModelText(byte_tokenizer(), template=made, end_ids=frozenset({IM_END, END}), max_context=max_context)


def published_model(name: str, end: str) -> ModelText:
    """A token a byte, with the chat template of a published model, shortened in its prose; `end` ends an answer."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    source = (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    end_id = tokenizer.token_to_id(end)
    assert end_id is not None
    template = ChatTemplate(source, {"bos_token": "", "eos_token": end})
    return ModelText(tokenizer, template=template, end_ids=frozenset({end_id}), max_context=40_000)


class PlayedByHand(Episode):
    """An episode whose answers are a list of texts, or a function of the prompt's text.

    An answer that ends with `…` is cut off there; any other one ends with the model's end token.
    """

    def __init__(
        self,
        text: ModelText,
        answers: Sequence[str] | Callable[[str], str],
        *,
        name: str = "1/0",
        index: int = 0,
        seed: int = 0,
        max_context: int = 4096,
        task: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name, index=index, seed=seed, max_context=max_context, task=task)
        self._text = text
        self._answers = answers
        self.prompts: list[list[int]] = []
        self.limits: list[CallLimits] = []
        self.drawn: list[DrawnAnswer] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def draw(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        await self.gate.wait()
        self.prompts.append(list(prompt))
        self.limits.append(limits)
        said = self._answers
        answer = said(self.shown(-1)) if callable(said) else said[len(self.prompts) - 1]
        tokens = self._text.encode(answer.removesuffix("…"))
        if not answer.endswith("…"):
            tokens.append(min(self._text.end_ids))
        assert limits.max_tokens is not None
        finish = "length" if answer.endswith("…") or len(tokens) > limits.max_tokens else "stop"
        tokens = tokens[: limits.max_tokens]
        self.drawn.append(DrawnAnswer(tokens, [-0.5] * len(tokens), finish))
        return self.drawn[-1]

    def shown(self, call: int) -> str:
        """The text of a call's prompt."""
        return self._text.decode(self.prompts[call], special=True)
