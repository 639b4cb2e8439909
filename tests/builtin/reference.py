"""What transformers itself makes of a model directory: the other opinion on every token and log-probability."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4
"""Of a log-probability in float32."""


class Reference:
    """The model with transformers' own eager attention, one text at a time: no batch, no cache of ours."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        self.model.generation_config.eos_token_id = None

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Its `generate`, which nothing stops before so many tokens."""
        text = torch.tensor([prompt])
        made = self.model.generate(
            text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
        )
        return made[0, len(prompt) :].tolist()

    @torch.no_grad()
    def distributions(self, prompt: list[int], answer: list[int], temperature: float = 1.0) -> torch.Tensor:
        """(tokens of the answer, vocabulary): the log-probabilities at each place, from one full forward pass."""
        logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.float() / temperature, -1)

    def logprobs(self, prompt: list[int], answer: list[int], temperature: float = 1.0) -> list[float]:
        at = torch.tensor(answer).unsqueeze(1)
        return self.distributions(prompt, answer, temperature).gather(1, at).squeeze(1).tolist()

    def error(self, prompt: list[int], answer: list[int], logprobs: list[float], temperature: float = 1.0) -> float:
        """The largest difference between our log-probabilities and those of the full pass."""
        expected = self.logprobs(prompt, answer, temperature)
        return max(abs(ours - theirs) for ours, theirs in zip(logprobs, expected, strict=True))
