"""Episodes as reward functions see them: the tokens of their calls as text, and the tool calls in what was drawn.

Rules kept here: text comes from the tokens that the policy saw and drew, never from what a host says of them, so that
an episode that is scored again, by another process or after a kill, reads the same. A call goes on from an earlier one
where its prompt begins with all tokens of that one, as in training (trainer/sequences.py).
"""

from collections.abc import Sequence

import numpy as np

from polyrl.client import EpisodeCall
from polyrl.data.tokens import ModelTokenizer, TokenIds
from polyrl.hosts.tool_syntax import ToolSyntax, find_syntax, read_calls
from polyrl.manager.calls import OPEN, CallRecord, prompt_of
from polyrl.rewards.groups import AnswerFacts
from polyrl.rewards.reward import CallText, RewardEpisode, ToolUse
from polyrl.run.task_contract import Answered
from polyrl.trainer.sequences import find_beginning
from polyrl.wire.columns import TOKEN_IDS


class Conversations:
    """Writes answers and episodes out as text."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._syntax: ToolSyntax | None = None
        if tokenizer.chat_template:
            from polyrl.data.chat_template import ChatTemplate

            self._syntax = find_syntax(ChatTemplate(tokenizer.chat_template, {}))

    def write(self, answered: Answered) -> AnswerFacts:
        """Return what a reward function is told of an answer."""
        num_tokens = len(answered.tokens)
        if answered.own is None:
            return AnswerFacts(self._tokenizer.text(answered.tokens), answered.finish, num_tokens)
        calls = self._calls(answered.calls, np.asarray(answered.tokens, np.int32))
        last = calls[-1].drawn if calls else ""
        episode = RewardEpisode(calls, answered.own.value, dict(answered.own.parts))
        return AnswerFacts(last, answered.finish, num_tokens, episode)

    def tool_calls(self, text: str) -> list[ToolUse]:
        """Return the tool calls that the policy wrote."""
        found = [] if self._syntax is None else read_calls(text, self._syntax, []).calls
        return [ToolUse(one.name, one.arguments) for one in found]

    def _calls(self, calls: Sequence[EpisodeCall], drawn: TokenIds) -> list[CallText]:
        written: list[CallText] = []
        sequences: list[TokenIds] = []
        last_calls: list[int] = []
        """The number of the last call of each sequence."""
        for number, call in enumerate(calls):
            prompt, answer = call.prompt.astype(np.int32), drawn[call.start : call.end]
            at, whole = find_beginning(prompt, sequences), np.concatenate([prompt, answer])
            after, num_known = (-1, 0) if at is None else (last_calls[at], len(sequences[at]))
            if at is None:
                sequences.append(whole)
                last_calls.append(number)
            else:
                sequences[at], last_calls[at] = whole, number
            given = self._tokenizer.written_out(prompt[num_known:].tolist())
            text = self._tokenizer.text(answer.tolist())
            written.append(CallText(given, text, self.tool_calls(text), call.finish, after))
        return written


def calls_of(records: Sequence[CallRecord], cells: bytes | bytearray) -> list[EpisodeCall]:
    """Return the calls of an episode that were answered, as a trainer gets them."""
    return [
        EpisodeCall(
            np.frombuffer(prompt_of(records, cells, number), TOKEN_IDS),
            *(call.start, call.end, call.finish, call.is_trained),
        )
        for number, call in enumerate(records)
        if call.end != OPEN
    ]
