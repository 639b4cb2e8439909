"""A Hugging Face sequence classifier in this process: texts to tokens, and batches of tokens to scores.

Rules kept here: nothing is downloaded, unpickled or run from the model's folder. A folder that lacks some of its
classifier's weights is refused: transformers would draw them at random. Tokens that only the tokenizer may write (the
end of a turn, for example) are taken out of prompts and answers. A batch is padded on the right, and gives each answer
the score that it has alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyrl.errors import one_line
from polyrl.rewards.models.settings import RewardModelArgs, label_number
from polyrl.rewards.reward import RewardFailed, RewardInput, RewardStops, RewardUnavailable

if TYPE_CHECKING:
    from torch import Tensor

_MOST_TOKENS = 1 << 24
"""A tokenizer without a limit reports a larger number."""

InputTokens = Mapping[str, list[int]]
_Message = dict[str, Any]


class Classifier:
    """Loaded when it is made, which takes a while. Raises RewardStops."""

    def __init__(self, args: RewardModelArgs) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._args = args
        torch.set_num_threads(args.threads)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                args.path, local_files_only=True, trust_remote_code=False
            )
            model, told = AutoModelForSequenceClassification.from_pretrained(
                args.path,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=args.dtype if args.dtype == "auto" else getattr(torch, args.dtype),
                output_loading_info=True,
            )
            self._model: Any = model.to(args.device).eval()
        except Exception as error:  # a folder may hold anything, and its readers raise as much
            raise RewardStops(f"args.path: {args.path}: cannot be loaded: {one_line(error)}") from error
        if told["missing_keys"]:
            raise RewardStops(f"args.path: {args.path} lacks {sorted(told['missing_keys'])[0]}: it is no classifier")
        config = self._model.config
        labels = tuple(str(config.id2label[number]) for number in range(config.num_labels))
        self._label = label_number(labels, args.label)
        self._max_tokens = _longest(args.max_tokens, config, self._tokenizer)
        self._tokenizer.truncation_side = "right" if args.truncate == "right" else "left"
        self._special = _special_tokens(self._tokenizer)
        self._pad = config.pad_token_id
        self.num_batches = 0

    def encode(self, given: RewardInput) -> InputTokens:
        """Return the tokens of a prompt and its answer. Raises RewardFailed for one that is too long, if it says so."""
        answer = without(given.conversation, self._special)
        prompt = prompt_of(given, self._args.prompt_key)
        how: dict[str, Any] = {}
        if self._max_tokens and self._args.truncate != "no":
            how = {"truncation": True, "max_length": self._max_tokens}
        if self._is_chat:
            text = self._tokenizer.apply_chat_template(
                [*_messages(prompt, self._special), {"role": "assistant", "content": answer}], tokenize=False
            )
            found = self._tokenizer(text, add_special_tokens=False, **how)
        else:
            found = self._tokenizer(without(_plain(prompt), self._special), answer, **how)
        num = len(found["input_ids"])
        if self._max_tokens and num > self._max_tokens:
            raise RewardFailed(f"prompt and answer have {num} tokens, expected at most {self._max_tokens}")
        if not num:
            raise RewardFailed("prompt and answer have no tokens")
        return {name: list(values) for name, values in found.items()}

    @property
    def _is_chat(self) -> bool:
        return self._args.form == "chat" or (self._args.form == "auto" and bool(self._tokenizer.chat_template))

    def scores(self, batch: Sequence[InputTokens]) -> list[float]:
        """Return the score of each; NaN for one that has none. Raises RewardUnavailable."""
        import torch

        self.num_batches += 1
        pad = self._pad_for(batch)
        if pad is None:
            return [score for one in batch for score in self.scores([one])]
        self._model.config.pad_token_id = pad
        try:
            with torch.inference_mode():
                logits = self._model(**self._padded(batch, pad)).logits.float().cpu()
        except torch.OutOfMemoryError as error:
            raise RewardUnavailable(f"{self._args.device} has no memory for a batch of {len(batch)}") from error
        return [to_score(row.tolist(), self._label, sigmoid=self._args.sigmoid) for row in logits]

    def _pad_for(self, batch: Sequence[InputTokens]) -> int | None:
        """Return the padding token: the model's own, or one that no answer of the batch has. None: there is none."""
        if self._pad is not None:
            return self._pad
        used = {token for one in batch for token in one["input_ids"]}
        free = next((token for token in range(self._model.config.vocab_size) if token not in used), None)
        return 0 if free is None and len(batch) == 1 else free

    def _padded(self, batch: Sequence[InputTokens], pad: int) -> "dict[str, Tensor]":
        import torch

        longest = max(len(one["input_ids"]) for one in batch)
        found: dict[str, Any] = {}
        for name in batch[0]:
            fill = pad if name == "input_ids" else 0
            rows = [one[name] + [fill] * (longest - len(one[name])) for one in batch]
            found[name] = torch.tensor(rows, device=self._args.device)
        return found


def to_score(logits: Sequence[float], label: int, *, sigmoid: bool) -> float:
    """Return the only logit, or its sigmoid; of several, the label's probability. NaN stays NaN."""
    if label >= len(logits):
        raise RewardFailed(f"the model has {len(logits)} labels, and label {label} was asked for")
    if not all(math.isfinite(one) for one in logits):
        return math.nan
    if len(logits) == 1:
        return _sigmoid(logits[0]) if sigmoid else float(logits[0])
    if sigmoid:
        return _sigmoid(logits[label])
    largest = max(logits)
    weights = [math.exp(one - largest) for one in logits]
    return weights[label] / math.fsum(weights)


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))


def without(text: str, tokens: Sequence[str]) -> str:
    """Return a text in which none of these occurs, not even after others were taken out.

    One pass: an answer may nest them, each to be found when the one within it is gone.
    """
    if not any(one in text for one in tokens):
        return text
    known, kept = frozenset(tokens), list[str]()
    ends, lengths = {one[-1] for one in tokens}, sorted({len(one) for one in tokens}, reverse=True)
    for letter in text:
        kept.append(letter)
        if letter in ends:
            tail = "".join(kept[-lengths[0] :])
            found = next((num for num in lengths if num <= len(tail) and tail[-num:] in known), 0)
            del kept[len(kept) - found :]
    return "".join(kept)


def prompt_of(given: RewardInput, key: str) -> str | list[_Message]:
    """Return the prompt: as the policy saw it, or the row's column. Raises RewardFailed for a column that is none."""
    if not key:
        return given.prompt
    found = given.row.get(key)
    is_chat = isinstance(found, list) and all(isinstance(one, dict) and "role" in one for one in found)
    if not isinstance(found, str) and not (is_chat and found):
        raise RewardFailed(f"args.prompt_key: the row's column {key!r} is neither a text nor messages")
    return found


def _special_tokens(tokenizer: Any) -> list[str]:
    """Return the tokens that are no text: those with a part to play, and all that were added as special."""
    added = [str(one) for one in tokenizer.added_tokens_decoder.values() if one.special]
    return sorted({*tokenizer.all_special_tokens, *added} - {""}, key=lambda one: (-len(one), one))


def _plain(prompt: str | list[_Message]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(one.get("content", "")) for one in prompt)


def _messages(prompt: str | list[_Message], special: Sequence[str]) -> list[_Message]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": without(prompt, special)}]
    return [{**one, "content": without(str(one.get("content", "")), special)} for one in prompt]


def _longest(wanted: int, config: Any, tokenizer: Any) -> int:
    """Return the most tokens of an input; 0: no limit is known."""
    known = [wanted, getattr(config, "max_position_embeddings", 0) or 0, int(tokenizer.model_max_length)]
    known = [one for one in known if 0 < one <= _MOST_TOKENS]
    return min(known) if known else 0
