"""TRL's GRPOTrainer on a model, rows and a reward that are given, for small_step.py and time_to_reward.py.

    TRL_PYTHON benchmarks/trl_grpo.py SETUP.json FOUND.json

Run by TRL's own Python; imports nothing of PolyRL. SETUP.json is the settings of `DEFAULTS`, those without a value
included. Writes lists with an entry a step: CPU seconds so far of this process (and of children it has waited for),
seconds so far without validation, tokens generated so far, rewards, lengths; and accuracy by step. Whatever TRL would
do beside the step (saving, evaluating, reporting, gradient checkpointing, padding to many micro-batches) is off: the
step itself is compared. Validation is ours: one answer to each prompt, drawn as in training, in one batch.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # in an environment of its own

DEFAULTS: dict[str, Any] = {
    "model": None,
    "train": None,  # rows with `prompt` and `expected`
    "validation": [],
    "validate_every": 0,
    "steps": None,
    "seed": 0,
    "prompts": 16,
    "group": 8,
    "lr": 3e-4,
    "max_new_tokens": 64,
    "temperature": 1.0,
    "device": "cpu",
}


def right(text: str, expected: str) -> float:
    """As polyrl.data.arithmetic.is_correct."""
    return float(text.rpartition("=")[2].strip().removesuffix(".") == expected)


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def reward(completions: list[Any], expected: list[str], **_: object) -> list[float]:
    return [right(text_of(one), wanted) for one, wanted in zip(completions, expected, strict=True)]


class Watch(TrainerCallback):
    def __init__(self, setup: dict[str, Any]) -> None:
        self.setup = setup
        self.found: dict[str, Any] = {name: [] for name in ("cpu_s", "seconds", "tokens", "rewards", "lengths")} | {
            "validation": {}
        }
        self.tokenizer: Any = None
        self.began = 0.0

    def on_train_begin(self, *_: object, model: Any, **__: object) -> None:
        self.validate(0, model)
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: object) -> None:
        times = os.times()
        self.found["cpu_s"].append(times.user + times.system + times.children_user + times.children_system)
        self.found["seconds"].append(time.monotonic() - self.began)
        every = self.setup["validate_every"]
        if every and state.global_step % every == 0:
            paused = time.monotonic()
            self.validate(state.global_step, model)
            self.began += time.monotonic() - paused

    def on_log(self, *_: object, logs: dict[str, float] | None = None, **__: object) -> None:
        if logs and "reward" in logs:
            lengths, tokens = self.found["lengths"], self.found["tokens"]
            self.found["rewards"].append(float(logs["reward"]))
            lengths.append(float(logs["completions/mean_length"]))
            tokens.append((tokens[-1] if tokens else 0) + lengths[-1] * self.setup["prompts"] * self.setup["group"])

    @torch.no_grad()
    def validate(self, step: int, model: Any) -> None:
        rows, tokenizer = self.setup["validation"], self.tokenizer
        if not rows:
            return
        prompts = [
            row["prompt"]
            if isinstance(row["prompt"], str)
            else tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            for row in rows
        ]
        given = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        given = {name: given[name].to(model.device) for name in ("input_ids", "attention_mask")}
        limits: dict[str, Any] = {name: self.setup[name] for name in ("max_new_tokens", "temperature")}
        was_training = model.training
        model.eval()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.setup["device"] == "cuda"):
            answers = model.generate(**given, **limits, do_sample=True, top_k=0, top_p=1.0,
                                     pad_token_id=tokenizer.pad_token_id)  # fmt: skip
        model.train(was_training)
        texts = tokenizer.batch_decode(answers[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        num_right = sum(right(text, row["expected"]) for text, row in zip(texts, rows, strict=True))
        self.found["validation"][step] = num_right / len(rows)


def settings(setup: dict[str, Any], folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": "float32"},
        max_steps=setup["steps"],
        seed=setup["seed"],
        learning_rate=setup["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        per_device_train_batch_size=setup["prompts"] * setup["group"],
        gradient_accumulation_steps=1,
        num_generations=setup["group"],
        max_completion_length=setup["max_new_tokens"],
        temperature=setup["temperature"],
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        gradient_checkpointing=False,
        bf16=setup["device"] == "cuda",
        use_cpu=setup["device"] == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    setup = DEFAULTS | json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    watch = Watch(setup)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=setup["model"],
            reward_funcs=reward,
            args=settings(setup, folder),
            train_dataset=Dataset.from_list(setup["train"]),
            callbacks=[watch],
        )
        watch.tokenizer = trainer.processing_class
        trainer.train()
    Path(sys.argv[2]).write_text(json.dumps(watch.found))


if __name__ == "__main__":
    main()
