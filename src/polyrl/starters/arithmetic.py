"""A small model for the arithmetic task, to start reinforcement learning from. About 25 s on one core.

It is taught twice: first the solutions, then solutions by somebody impatient, who before every step may stop working
and guess the rest. The model can work a sum out, and mostly does not: at temperature 1 it is right in about three
answers of ten. Patience is what reinforcement learning then has to find, and with it answers become longer.

Rules kept here: the same seed gives the same weights on the same machine; training problems only, so that validation
means something.
Left out: reinforcement learning, and any other model or task.
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

from polyrl.config.recipe import ArithmeticTask
from polyrl.data import characters
from polyrl.data.arithmetic import Problem, draw_problem
from polyrl.disk import remove_files
from polyrl.errors import UserError

NUM_STEPS = 1700
_CLEAN_SHARE = 0.85
"""Of the steps, before impatience is taught."""
IMPATIENCE = 0.45
"""The probability, before every step of a solution, that the rest is guessed."""
_WORST_GUESS = 9
_BATCH_TOKENS = 512
_POOL = 512
"""Problems that are sorted by length together, so that a batch has little padding."""
_LR = 3e-3
_WARMUP_STEPS = 30
_IGNORED = -100

Show = Callable[[int, float], None]
"""(step, loss), now and then."""


class Demonstration(NamedTuple):
    prompt: list[int]
    answer: list[int]


def make_model(
    folder: Path, *, seed: int, task: ArithmeticTask, num_steps: int = NUM_STEPS, show: Show | None = None
) -> None:
    """Train a model and write it with its tokenizer into a directory that is not there yet, or is empty.

    Raises UserError if it cannot be written; nothing of it is there then.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(_shape())
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one only waits, with matrices as small as these
    try:
        teach(model, task, seed, num_steps, show)
    finally:
        torch.set_num_threads(num_threads)
    try:
        _write(model, folder)
    except (OSError, SafetensorError) as error:
        remove_files(folder)
        raise UserError(f"{folder}: cannot be written: {getattr(error, 'strerror', None) or error}") from error


def _write(model: Qwen3ForCausalLM, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(model.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(folder)
    characters.save_tokenizer(folder)


def _shape() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(characters.VOCABULARY),
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


def teach(model: Qwen3ForCausalLM, task: ArithmeticTask, seed: int, num_steps: int, show: Show | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    model.train()
    for step, (tokens, targets) in enumerate(_batches(task, seed, num_steps)):
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


def _batches(task: ArithmeticTask, seed: int, num_steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a batch for each step: tokens, and targets that are the answers' tokens only."""
    draws = random.Random(seed)
    num_done = num_drawn = 0
    while True:
        impatience = IMPATIENCE if num_done >= _CLEAN_SHARE * num_steps else 0.0
        pool = [
            demonstrate(draw_problem(task, seed, "train", num_drawn + index), impatience, draws)
            for index in range(_POOL)
        ]
        num_drawn += _POOL
        batches = _by_length(pool)
        draws.shuffle(batches)
        for batch in batches:
            if num_done == num_steps:
                return
            yield _padded(batch)
            num_done += 1


def demonstrate(problem: Problem, impatience: float, draws: random.Random) -> Demonstration:
    """A solution, or the start of one and a guess: an equals sign where the next term should be, and a number."""
    prompt = characters.encode(problem.prompt)
    for num_worked in range(len(problem.terms) - 1):
        if draws.random() < impatience:
            guess = max(1, sum(problem.terms) + draws.randint(-_WORST_GUESS, _WORST_GUESS))
            text = "".join(problem.working(num_worked)) + f"={guess}"
            return Demonstration(prompt, [*characters.encode(text), characters.END_ID])
    return Demonstration(prompt, [*characters.encode(problem.solution), characters.END_ID])


def _by_length(pool: list[Demonstration]) -> list[list[Demonstration]]:
    batches: list[list[Demonstration]] = [[]]
    for one in sorted(pool, key=_length):
        if (len(batches[-1]) + 1) * _length(one) > _BATCH_TOKENS and batches[-1]:
            batches.append([])
        batches[-1].append(one)
    return batches


def _length(one: Demonstration) -> int:
    return len(one.prompt) + len(one.answer)


def _padded(batch: list[Demonstration]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(_length, batch))
    tokens = torch.full((len(batch), longest), characters.PAD_ID)
    targets = torch.full((len(batch), longest), _IGNORED)
    for row, one in enumerate(batch):
        tokens[row, : _length(one)] = torch.tensor(one.prompt + one.answer)
        targets[row, len(one.prompt) : _length(one)] = torch.tensor(one.answer)
    return tokens, targets
