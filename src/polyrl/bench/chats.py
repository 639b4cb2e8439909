"""The conversations of conversations.py as chats: messages at a host's front, of as many tokens.

A token is a word, `w17`, and the template writes few tokens around a message, so that a chat's prompts are as long as
those of the same conversation in tokens. Answers are as the model draws them: their text is what comes back.
"""

import time

import aiohttp
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from polyrl.bench.conversations import Phase, Talk, TimedTurn, ids_of, length_of
from polyrl.data.chat_template import ChatTemplate
from polyrl.hosts.texts import ModelText

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
_AROUND_FIRST, _AROUND_NEXT = 5, 6
"""Tokens that the template writes: around a message and before the answer; and the end of the answer before it."""
_ROLE = "role"


def chat_text(talk: Talk) -> ModelText:
    """Return a tokenizer with a word for each id. Ids below 3 are marks, and the names of roles."""
    words = {"<|im_start|>": 0, "<|im_end|>": 1, _ROLE: 2, **{f"w{number}": number for number in range(3, talk.vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_ROLE))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    return ModelText(tokenizer, template=ChatTemplate(_TEMPLATE, {}), max_context=talk.longest + 1)


async def chat(
    talk: Talk, phase: Phase, index: int, client: aiohttp.ClientSession, base_url: str, turns: list[TimedTurn]
) -> None:
    """Hold one conversation, and note its turns."""
    messages = [{"role": "user", "content": _words(ids_of(talk, talk.first - _AROUND_FIRST, index, -1))}]
    num_new = talk.first
    for turn in range(phase.num_turns):
        began = time.perf_counter()
        body = {"messages": messages, "max_tokens": length_of(phase, index, turn)}
        async with client.post(f"{base_url}/chat/completions", json=body) as response:
            response.raise_for_status()
            said = await response.json()
        turns.append(TimedTurn(began, time.perf_counter(), said["usage"]["prompt_tokens"], num_new))
        given = {"role": "user", "content": _words(ids_of(talk, talk.given - _AROUND_NEXT, index, turn))}
        messages = [*messages, said["choices"][0]["message"], given]
        num_new = 1 + talk.given


def _words(ids: list[int]) -> str:
    return " ".join(f"w{one}" for one in ids)
