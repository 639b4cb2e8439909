"""Replies to OpenAI's clients, in OpenAI's shapes: whole, or as the chunks of a stream.

A field that a shape has and that we cannot know is null or left out.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from msgspec import UNSET, Struct, UnsetType

from polyrl.ids import SampleId
from polyrl.manager.payload import SampleTokens
from polyrl.manager.serving.requests import Choices
from polyrl.manager.serving.texts import NOT_A_CHARACTER, Reader, TextModel
from polyrl.wire import columns
from polyrl.wire.columns import CELL_BYTES

FinishReason = Literal["stop", "length"]


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "polyrl"
    max_model_len: int | None = None
    """Tokens of a prompt and its answer together, where the model's directory says it."""


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


# Completions


class TextLogprobs(Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int]


class TextChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    """The version of the weights that was the newest when it began."""
    choices: tuple[TextChoice, ...]
    usage: Usage | UnsetType | None = UNSET


# Chats


class ChatLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Any] = []
    """Always empty: only the log-probability of the sampled token is known."""


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatReply(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatChoice, ...]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatDeltaChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: tuple[ChatDeltaChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# A choice, and the replies made of choices


class ChoicePiece(NamedTuple):
    """A part of a choice."""

    text: str
    tokens: list[int]
    logprobs: list[float]


class ChoiceInProgress:
    """A choice of a request while its tokens come."""

    def __init__(self, index: int, prompt: list[int], sample: SampleId, tokens: SampleTokens, reader: Reader) -> None:
        self.index = index
        self.prompt = prompt
        self.sample = sample
        self.tokens = tokens
        self.reader = reader
        self.finish: FinishReason | None = None
        self.piece = ChoicePiece("", [], [])
        """All of it, so far."""
        self.num_characters = 0
        """Length of the tokens whose log-probabilities were sent, for the offsets of the next."""

    def more(self) -> ChoicePiece | None:
        """Return what has come since the last call; None for nothing."""
        if self.finish is not None:
            return None
        reader, num_shown = self.reader, len(self.reader.text)
        first = reader.num_tokens
        cells = columns.view_cells(bytes(self.tokens.cells[first * CELL_BYTES :]))
        reader.read(cells["token"].tolist())
        if self.tokens.finish and not reader.is_stopped:
            reader.end()
        if reader.is_stopped or self.tokens.finish:
            self.finish = "length" if self.tokens.finish == "length" and not reader.is_stopped else "stop"
        num = reader.num_tokens - first
        if not num and self.finish is None:
            return None
        piece = ChoicePiece(reader.text[num_shown:], cells["token"][:num].tolist(), cells["logprob"][:num].tolist())
        before = self.piece
        before.tokens.extend(piece.tokens)
        before.logprobs.extend(piece.logprobs)
        self.piece = before._replace(text=reader.text)
        return piece


class ReplyHead(NamedTuple):
    """Fields that every reply to a request has."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class ReplyShape(Protocol):
    def whole(self, answers: Sequence[ChoiceInProgress]) -> Struct: ...

    def begin(self, answer: ChoiceInProgress) -> Struct | None:
        """Return the first chunk of a choice, before its first token."""
        ...

    def chunk(self, answer: ChoiceInProgress, piece: ChoicePiece) -> Struct | None: ...

    def usage(self, usage: Usage) -> Struct: ...


class _Shape:
    def __init__(self, head: ReplyHead, choices: Choices, model: TextModel | None) -> None:
        self._head = head._asdict()
        self._choices = choices
        self._model = model


class Completions(_Shape):
    """Replies to completions."""

    def whole(self, answers: Sequence[ChoiceInProgress]) -> Struct:
        choices = tuple(self._choice(one, one.piece, prompt=one.prompt) for one in answers)
        return Completion(**self._head, choices=choices, usage=usage_of(answers))

    def begin(self, answer: ChoiceInProgress) -> Struct | None:
        if not self._choices.with_token_ids:
            return None
        choice = TextChoice(index=answer.index, text="", token_ids=[], prompt_token_ids=answer.prompt)
        return Completion(**self._head, choices=(choice,), usage=_no_usage(self._choices))

    def chunk(self, answer: ChoiceInProgress, piece: ChoicePiece) -> Struct | None:
        if _says_nothing(self._choices, answer, piece):
            return None
        choice = self._choice(answer, piece, prompt=None)
        return Completion(**self._head, choices=(choice,), usage=_no_usage(self._choices))

    def usage(self, usage: Usage) -> Struct:
        return Completion(**self._head, choices=(), usage=usage)

    def _choice(self, answer: ChoiceInProgress, piece: ChoicePiece, *, prompt: list[int] | None) -> TextChoice:
        with_ids = self._choices.with_token_ids
        return TextChoice(
            index=answer.index,
            text=piece.text,
            logprobs=self._logprobs(answer, piece) if self._choices.with_logprobs else None,
            finish_reason=answer.finish,
            token_ids=piece.tokens if with_ids else UNSET,
            prompt_token_ids=prompt if with_ids and prompt is not None else UNSET,
        )

    def _logprobs(self, answer: ChoiceInProgress, piece: ChoicePiece) -> TextLogprobs:
        """Return log-probabilities. Where a character takes several tokens, the offsets are only near."""
        shown = [_show(self._model, token) for token in piece.tokens]
        offsets: list[int] = []
        offset = answer.num_characters
        for text in shown:
            offsets.append(offset)
            offset += len(text)
        answer.num_characters = offset
        return TextLogprobs(tokens=shown, token_logprobs=piece.logprobs, text_offset=offsets)


class Chats(_Shape):
    """Replies to chats."""

    def whole(self, answers: Sequence[ChoiceInProgress]) -> Struct:
        with_ids = self._choices.with_token_ids
        choices: list[ChatChoice] = []
        for one in answers:
            assert one.finish is not None
            choices.append(
                ChatChoice(
                    index=one.index,
                    message=ChatMessage(content=one.piece.text),
                    logprobs=self._logprobs(one.piece),
                    finish_reason=one.finish,
                    token_ids=one.piece.tokens if with_ids else UNSET,
                )
            )
        prompt = answers[0].prompt if with_ids else UNSET
        return ChatReply(**self._head, choices=tuple(choices), usage=usage_of(answers), prompt_token_ids=prompt)

    def begin(self, answer: ChoiceInProgress) -> Struct | None:
        delta = ChatDelta(role="assistant", content="")
        choice = ChatDeltaChoice(index=answer.index, delta=delta)
        prompt = answer.prompt if self._choices.with_token_ids else UNSET
        return self._chunk(choice, prompt)

    def chunk(self, answer: ChoiceInProgress, piece: ChoicePiece) -> Struct | None:
        if _says_nothing(self._choices, answer, piece):
            return None
        choice = ChatDeltaChoice(
            index=answer.index,
            delta=ChatDelta(content=piece.text) if piece.text else ChatDelta(),
            logprobs=self._logprobs(piece),
            finish_reason=answer.finish,
            token_ids=piece.tokens if self._choices.with_token_ids else UNSET,
        )
        return self._chunk(choice, UNSET)

    def usage(self, usage: Usage) -> Struct:
        return ChatChunk(**self._head, choices=(), usage=usage)

    def _chunk(self, choice: ChatDeltaChoice, prompt: list[int] | UnsetType) -> Struct:
        return ChatChunk(**self._head, choices=(choice,), usage=_no_usage(self._choices), prompt_token_ids=prompt)

    def _logprobs(self, piece: ChoicePiece) -> ChatLogprobs | None:
        if not self._choices.with_logprobs:
            return None
        content: list[ChatLogprob] = []
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
            text = _show(self._model, token)
            data = None if NOT_A_CHARACTER in text else list(text.encode())  # half a character's bytes are not known
            content.append(ChatLogprob(token=text, logprob=logprob, bytes=data))
        return ChatLogprobs(content=content)


def usage_of(answers: Sequence[ChoiceInProgress]) -> Usage:
    """Return the usage. A prompt counts once, however many answers it has."""
    prompts = {id(one.prompt): len(one.prompt) for one in answers}
    num_prompt, num_answer = sum(prompts.values()), sum(len(one.piece.tokens) for one in answers)
    return Usage(prompt_tokens=num_prompt, completion_tokens=num_answer, total_tokens=num_prompt + num_answer)


def _no_usage(choices: Choices) -> UnsetType | None:
    """Return null in the chunks of a stream whose usage comes last, as OpenAI does."""
    return None if choices.with_usage else UNSET


def _says_nothing(choices: Choices, answer: ChoiceInProgress, piece: ChoicePiece) -> bool:
    wants_tokens = choices.with_logprobs or choices.with_token_ids
    return not piece.text and answer.finish is None and not (wants_tokens and piece.tokens)


def _show(model: TextModel | None, token: int) -> str:
    """Return a token's text; where there is no tokenizer, its number."""
    return f"token_id:{token}" if model is None else model.show(token)
