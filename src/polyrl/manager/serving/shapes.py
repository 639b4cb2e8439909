"""Choices in the shapes of replies: a whole answer, or a chunk of a stream, as a completion or as a chat."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import UNSET, Struct, UnsetType

from polyrl.manager.serving import replies
from polyrl.manager.serving.answers import ChoiceInProgress, ChoicePiece
from polyrl.manager.serving.requests import Choices
from polyrl.manager.serving.texts import NOT_A_CHARACTER, TextModel


class ReplyHead(NamedTuple):
    """What every reply of a request says."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ReplyShape(Protocol):
    def whole(self, answers: Sequence[ChoiceInProgress]) -> Struct: ...

    def begin(self, answer: ChoiceInProgress) -> Struct | None:
        """What a stream says of a choice before its first token."""
        ...

    def chunk(self, answer: ChoiceInProgress, piece: ChoicePiece) -> Struct | None: ...

    def usage(self, usage: replies.Usage) -> Struct: ...


class Completions:
    def __init__(self, head: ReplyHead, choices: Choices, model: TextModel | None) -> None:
        self._head = head._asdict()
        self._choices = choices
        self._model = model

    def whole(self, answers: Sequence[ChoiceInProgress]) -> Struct:
        choices = tuple(self._choice(one, one.piece, prompt=one.prompt) for one in answers)
        return replies.Completion(**self._head, choices=choices, usage=usage_of(answers))

    def begin(self, answer: ChoiceInProgress) -> Struct | None:
        if not self._choices.with_token_ids:
            return None
        choice = replies.TextChoice(index=answer.index, text="", token_ids=[], prompt_token_ids=answer.prompt)
        return replies.Completion(**self._head, choices=(choice,), usage=_no_usage(self._choices))

    def chunk(self, answer: ChoiceInProgress, piece: ChoicePiece) -> Struct | None:
        if _says_nothing(self._choices, answer, piece):
            return None
        choice = self._choice(answer, piece, prompt=None)
        return replies.Completion(**self._head, choices=(choice,), usage=_no_usage(self._choices))

    def usage(self, usage: replies.Usage) -> Struct:
        return replies.Completion(**self._head, choices=(), usage=usage)

    def _choice(self, answer: ChoiceInProgress, piece: ChoicePiece, *, prompt: list[int] | None) -> replies.TextChoice:
        with_ids = self._choices.with_token_ids
        return replies.TextChoice(
            index=answer.index,
            text=piece.text,
            logprobs=self._logprobs(answer, piece) if self._choices.with_logprobs else None,
            finish_reason=answer.finish,
            token_ids=piece.tokens if with_ids else UNSET,
            prompt_token_ids=prompt if with_ids and prompt is not None else UNSET,
        )

    def _logprobs(self, answer: ChoiceInProgress, piece: ChoicePiece) -> replies.TextLogprobs:
        """Offsets count the texts of single tokens: where a character takes several, they are no more than near."""
        shown = [_show(self._model, token) for token in piece.tokens]
        offsets: list[int] = []
        offset = answer.num_characters
        for text in shown:
            offsets.append(offset)
            offset += len(text)
        answer.num_characters = offset
        return replies.TextLogprobs(tokens=shown, token_logprobs=piece.logprobs, text_offset=offsets)


class Chats:
    def __init__(self, head: ReplyHead, choices: Choices, model: TextModel | None) -> None:
        self._head = head._asdict()
        self._choices = choices
        self._model = model

    def whole(self, answers: Sequence[ChoiceInProgress]) -> Struct:
        with_ids = self._choices.with_token_ids
        choices: list[replies.ChatChoice] = []
        for one in answers:
            assert one.finish is not None
            choices.append(
                replies.ChatChoice(
                    index=one.index,
                    message=replies.ChatMessage(content=one.piece.text),
                    logprobs=self._logprobs(one.piece),
                    finish_reason=one.finish,
                    token_ids=one.piece.tokens if with_ids else UNSET,
                )
            )
        prompt = answers[0].prompt if with_ids else UNSET
        return replies.ChatReply(**self._head, choices=tuple(choices), usage=usage_of(answers), prompt_token_ids=prompt)

    def begin(self, answer: ChoiceInProgress) -> Struct | None:
        delta = replies.ChatDelta(role="assistant", content="")
        choice = replies.ChatDeltaChoice(index=answer.index, delta=delta)
        prompt = answer.prompt if self._choices.with_token_ids else UNSET
        return self._chunk(choice, prompt)

    def chunk(self, answer: ChoiceInProgress, piece: ChoicePiece) -> Struct | None:
        if _says_nothing(self._choices, answer, piece):
            return None
        choice = replies.ChatDeltaChoice(
            index=answer.index,
            delta=replies.ChatDelta(content=piece.text) if piece.text else replies.ChatDelta(),
            logprobs=self._logprobs(piece),
            finish_reason=answer.finish,
            token_ids=piece.tokens if self._choices.with_token_ids else UNSET,
        )
        return self._chunk(choice, UNSET)

    def usage(self, usage: replies.Usage) -> Struct:
        return replies.ChatChunk(**self._head, choices=(), usage=usage)

    def _chunk(self, choice: replies.ChatDeltaChoice, prompt: list[int] | UnsetType) -> Struct:
        return replies.ChatChunk(
            **self._head, choices=(choice,), usage=_no_usage(self._choices), prompt_token_ids=prompt
        )

    def _logprobs(self, piece: ChoicePiece) -> replies.ChatLogprobs | None:
        if not self._choices.with_logprobs:
            return None
        content: list[replies.ChatLogprob] = []
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
            text = _show(self._model, token)
            data = None if NOT_A_CHARACTER in text else list(text.encode())  # half a character's bytes are not known
            content.append(replies.ChatLogprob(token=text, logprob=logprob, bytes=data))
        return replies.ChatLogprobs(content=content)


def usage_of(answers: Sequence[ChoiceInProgress]) -> replies.Usage:
    """A prompt counts once, however many answers it has."""
    prompts = {id(one.prompt): len(one.prompt) for one in answers}
    num_prompt, num_answer = sum(prompts.values()), sum(len(one.piece.tokens) for one in answers)
    return replies.Usage(prompt_tokens=num_prompt, completion_tokens=num_answer, total_tokens=num_prompt + num_answer)


def _no_usage(choices: Choices) -> UnsetType | None:
    """Who asked for the usage of a stream is told that it comes later."""
    return None if choices.with_usage else UNSET


def _says_nothing(choices: Choices, answer: ChoiceInProgress, piece: ChoicePiece) -> bool:
    wants_tokens = choices.with_logprobs or choices.with_token_ids
    return not piece.text and answer.finish is None and not (wants_tokens and piece.tokens)


def _show(model: TextModel | None, token: int) -> str:
    """A token by itself; where there is no text, by its number."""
    return f"token_id:{token}" if model is None else model.show(token)
