"""The policy: packs against lone samples, checkpointing, and one set of parameters for engine and trainer."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.builtin.tiny_models import FAMILIES, save_tiny
from tests.trainer.small import CAP, draw_groups, plain_logprobs, save_small
from transformers import AutoModelForCausalLM

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig
from polyrl.engines.builtin import packed
from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.engines.builtin.engine import BuiltinEngine
from polyrl.engines.engine import Job
from polyrl.errors import UserError
from polyrl.ids import LeaseId, SampleId
from polyrl.trainer.batch import TrainSample
from polyrl.trainer.model import Policy
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.packing import make_packs
from polyrl.trainer.step import StepAccumulator
from polyrl.wire.frames import Sampling

LENGTHS = ((3, 9), (12, 40), (5, 1), (1, 17), (30, 60), (7, 11), (1, 1))
"""Prompts and answers: within and beyond the window of 24 that some families have."""


def samples_of(vocab: int) -> list[TrainSample]:
    rng = np.random.default_rng(3)
    return [
        TrainSample(
            rng.integers(3, vocab, a).astype(np.int32),
            rng.integers(3, vocab, b).astype(np.int32),
            np.zeros(b, np.float32),
            0.0,
        )
        for a, b in LENGTHS
    ]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_pack_is_what_its_samples_are_alone(family, tmp_path):
    own_scale: dict[str, Any] = {"query_pre_attn_scalar": 40} if family in ("gemma2", "gemma3_text") else {}
    folder = save_tiny(family, tmp_path, **own_scale)
    policy = Policy.load(str(folder))
    samples = samples_of(512)
    (pack,) = make_packs(samples, 1000)
    scores = policy.score(pack)
    scores.logprobs.sum().backward()
    ours = gradients(policy.model)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    alone = [plain_logprobs(plain, samples[number]) for number in pack.samples]
    torch.cat([one for one, _ in alone]).sum().backward()
    torch.testing.assert_close(scores.logprobs, torch.cat([one for one, _ in alone]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores.entropy, torch.cat([one for _, one in alone]), rtol=1e-4, atol=1e-4)
    theirs = gradients(plain)
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert (one - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_gradient_checkpointing_changes_no_gradient(family, tmp_path):
    policy = Policy.load(str(save_tiny(family, tmp_path)))
    (pack,) = make_packs(samples_of(512), 1000)
    policy.score(pack).logprobs.sum().backward()
    plain = gradients(policy.model)
    policy.gradient_checkpointing = True
    saved = [0, 0]
    for number, on in enumerate((False, True)):
        policy.gradient_checkpointing = on

        def keep(one: torch.Tensor, at: int = number) -> torch.Tensor:
            saved[at] += one.numel()
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            scores = policy.score(pack)
        scores.logprobs.sum().backward()
        for name, one in gradients(policy.model).items():
            torch.testing.assert_close(one, plain[name])
    assert saved[1] < saved[0] / 4, "it keeps less"
    assert not any(module.training for module in policy.model.modules()), "and the engine does not notice"


def test_lengths_that_differ_much_share_no_bucket():
    layout = packed.lay_out([10, 11, 100, 1, 105], torch.device("cpu"), flash=False)
    assert isinstance(layout, packed.Buckets)
    assert layout.sizes == (packed.Bucket(1, 1), packed.Bucket(2, 11), packed.Bucket(2, 105))
    rows = torch.arange(227)
    assert torch.equal(rows[layout.there][layout.back], rows)


def test_the_engine_generates_with_the_weights_that_are_trained(tmp_path):
    """No copy: after a step the engine's log-probabilities are the new policy's, with nothing installed."""
    folder = save_small(tmp_path)
    policy = Policy.load(str(folder))
    optimizer = Optimizer(policy.parameters(), OptimizerConfig(lr=1e-2), 4)
    steps = StepAccumulator(policy, optimizer, AlgorithmConfig(max_mismatch=0), max_tokens=500, max_new_tokens=CAP)
    prompts = [[5, 9, 11], [7], [3, 4, 5, 6, 7, 8]]
    before = asyncio.run(generate(policy, folder, prompts))
    steps.begin(0)
    steps.add(draw_groups(1))
    assert not steps.finish().metrics["actor/skipped_updates"]
    after = asyncio.run(generate(policy, folder, prompts))
    for drawn, is_present in ((after, True), (before, False)):
        for one in drawn:
            known = plain_logprobs(policy.model, one)[0].detach().numpy()
            assert np.allclose(known, one.logprobs, atol=1e-4) is is_present
    steps.begin(1)
    steps.add([after])
    metrics = steps.finish().metrics
    assert metrics["actor/mismatch_kl"] < 1e-9


async def generate(policy: Policy, folder: Path, prompts: list[list[int]]) -> list[TrainSample]:
    config = BuiltinConfig(model=str(folder), kv_tokens=1024, slots=4)
    engine = BuiltinEngine(config, policy.loaded)
    sink = _Sink(len(prompts))
    await engine.start(sink)  # type: ignore[arg-type]
    for number, prompt in enumerate(prompts):
        engine.generate(Job(LeaseId(number + 1), SampleId(number), prompt, [], CAP, number, Sampling(ignore_eos=True)))
    await asyncio.wait_for(sink.done.wait(), 30)
    await engine.close()
    return [
        TrainSample(
            np.array(prompt, np.int32),
            np.array(sink.tokens_of[number + 1], np.int32),
            np.array(sink.logprobs_of[number + 1], np.float32),
            float(number),
        )
        for number, prompt in enumerate(prompts)
    ]


class _Sink:
    def __init__(self, num: int) -> None:
        self.tokens_of: dict[int, list[int]] = {}
        self.logprobs_of: dict[int, list[float]] = {}
        self.num_left = num
        self.done = asyncio.Event()

    def tokens(self, lease: int, tokens: Any, logprobs: Any, version: int) -> None:
        self.tokens_of.setdefault(lease, []).extend(tokens)
        self.logprobs_of.setdefault(lease, []).extend(logprobs)

    def ended(self, lease: int, reason: str, detail: str = "") -> None:
        self.num_left -= 1
        if not self.num_left:
            self.done.set()


def test_a_directory_without_a_model_is_refused_in_a_line(tmp_path):
    with pytest.raises(UserError, match=r"no config.json there"):
        Policy.load(str(tmp_path))
