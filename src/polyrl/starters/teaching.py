"""The common part of all starter models: their shape, supervised lessons, and the directory they are written to.

A lesson is a *demonstration*: tokens, some of them drawn by the teacher and taught, the others given (a prompt, an
environment's reply) and only read.

Rules kept here: the same seed gives the same weights on the same machine. A directory is whole, or nothing of it is
there.
Left out: what is taught. Each starter has its own demonstrations.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from polyrl.data import characters
from polyrl.disk import remove_files
from polyrl.errors import UserError

_BATCH_TOKENS = 512
_POOL = 512
"""Demonstrations that are sorted by length together, so that a batch has little padding."""
_LR = 3e-3
_WARMUP_STEPS = 30
_IGNORED = -100

Show = Callable[[int, float], None]
"""(step, loss), now and then."""


class Demonstration(NamedTuple):
    tokens: list[int]
    drawn: list[bool]
    """Whether the teacher drew the token: those alone are taught."""


Demonstrate = Callable[[int, float, random.Random], Demonstration]
"""(number of the demonstration, share of the lessons that is done, draws)."""


def make_model(
    folder: Path,
    demonstrate: Demonstrate,
    *,
    seed: int,
    num_steps: int,
    show: Show | None = None,
    save_tokenizer: Callable[[Path], None] = characters.save_tokenizer,
    num_words: int = len(characters.VOCABULARY),
) -> None:
    """Train a model and write it with its tokenizer into a directory that is not there yet, or is empty.

    Raises UserError if it cannot be written; nothing of it is there then.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(_shape(num_words))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one only waits, with matrices as small as these
    try:
        teach(model, demonstrate, seed, num_steps, show)
    finally:
        torch.set_num_threads(num_threads)
    try:
        _write(model, folder, save_tokenizer)
    except (OSError, SafetensorError) as error:
        remove_files(folder)
        raise UserError(f"{folder}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _write(model: Qwen3ForCausalLM, folder: Path, save_tokenizer: Callable[[Path], None]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(folder)
    save_tokenizer(folder)


def _shape(num_words: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=num_words,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.1,  # about 1 / sqrt(hidden_size); the usual 0.02 is for models a thousand times as large
        tie_word_embeddings=False,
        pad_token_id=characters.PAD_ID,
        eos_token_id=characters.END_ID,
        bos_token_id=None,
    )


def teach(
    model: Qwen3ForCausalLM, demonstrate: Demonstrate, seed: int, num_steps: int, show: Show | None = None
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    model.train()
    for step, (tokens, targets) in enumerate(_batches(demonstrate, seed, num_steps)):
        for group in optimizer.param_groups:
            group["lr"] = _LR * min(1.0, (step + 1) / _WARMUP_STEPS) * (1.0 - step / num_steps)
        logits = model(input_ids=tokens).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=_IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if show is not None and (step + 1) % 100 == 0:
            show(step + 1, loss.item())
    model.eval()


def _batches(demonstrate: Demonstrate, seed: int, num_steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a batch for each step: tokens, and targets that are the taught tokens only."""
    draws = random.Random(seed)
    num_done = num_drawn = 0
    while True:
        pool = [demonstrate(num_drawn + index, num_done / num_steps, draws) for index in range(_POOL)]
        num_drawn += _POOL
        batches = _by_length(pool)
        draws.shuffle(batches)
        for batch in batches:
            if num_done == num_steps:
                return
            yield _padded(batch)
            num_done += 1


def _by_length(pool: list[Demonstration]) -> list[list[Demonstration]]:
    batches: list[list[Demonstration]] = [[]]
    for one in sorted(pool, key=_length):
        if (len(batches[-1]) + 1) * _length(one) > _BATCH_TOKENS and batches[-1]:
            batches.append([])
        batches[-1].append(one)
    return batches


def _length(one: Demonstration) -> int:
    return len(one.tokens)


def _padded(batch: list[Demonstration]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(_length, batch))
    tokens = torch.full((len(batch), longest), characters.PAD_ID)
    targets = torch.full((len(batch), longest), _IGNORED)
    for row, one in enumerate(batch):
        tokens[row, : _length(one)] = torch.tensor(one.tokens)
        targets[row, : _length(one)] = torch.tensor(
            [token if drawn else _IGNORED for token, drawn in zip(one.tokens, one.drawn, strict=True)]
        )
    return tokens, targets
