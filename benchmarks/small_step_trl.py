"""TRL's side of small_step.py: GRPOTrainer on the same model, problems and reward. Run by TRL's own Python.

    TRL_PYTHON benchmarks/small_step_trl.py MODEL PROBLEMS.json STEPS SEED

Prints one JSON object: CPU seconds of this process (and of children it has waited for) at the end of each step, and the
rewards. Imports nothing of PolyRL. Whatever TRL would do beside the step (saving, evaluating, reporting, gradient
checkpointing, padding to many micro-batches) is off: the step itself is compared.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # in an environment of its own

PROMPTS, GROUP = 16, 8


def reward(completions: list[str], expected: list[str], **_: object) -> list[float]:
    """As polyrl.data.arithmetic.is_correct."""
    return [
        float(text.rpartition("=")[2].strip().removesuffix(".") == one)
        for text, one in zip(completions, expected, strict=True)
    ]


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.cpu_s: list[float] = []
        self.rewards: list[float] = []
        self.lengths: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        times = os.times()
        self.cpu_s.append(times.user + times.system + times.children_user + times.children_system)

    def on_log(self, *_: object, logs: dict[str, float] | None = None, **__: object) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))
            self.lengths.append(float(logs["completions/mean_length"]))


def main() -> None:
    model, problems, num_steps, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=num_steps,
            seed=seed,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            per_device_train_batch_size=PROMPTS * GROUP,
            gradient_accumulation_steps=1,
            num_generations=GROUP,
            max_completion_length=64,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            scale_rewards="group",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = Dataset.from_list(json.loads(problems.read_text()))
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=data, callbacks=[watch])
        trainer.train()
    print(json.dumps({"cpu_s": watch.cpu_s, "rewards": watch.rewards, "lengths": watch.lengths}))


if __name__ == "__main__":
    main()
