"""How far engines are from the trainer, told for each kind of engine and age of its weights."""

import numpy as np
import pytest
import torch

from polyrl.trainer import mismatch
from polyrl.trainer.batch import TrainSample, TrainSegment
from polyrl.trainer.tally import Tally


def sample(num_tokens: int, *turns: TrainSegment) -> TrainSample:
    tokens, logprobs = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32)
    return TrainSample(tokens, tokens, logprobs, 0.0, written_by=turns)


def told(apart: list[float], samples: list[TrainSample], step: int) -> dict[str, float]:
    tally = Tally(torch.device("cpu"))
    numbers = torch.tensor(apart)
    tally.add({"actor/mismatch_kl": numbers, **mismatch.by_writer(numbers, samples, step)})
    return mismatch.of_their_own(tally.metrics(len(apart)))


def test_each_engine_and_age_has_the_mean_of_its_own_tokens():
    first = sample(3, TrainSegment(7, 1, "vllm"), TrainSegment(8, 2, "vllm"))
    second = sample(2, TrainSegment(8, 2, "sglang"))
    assert told([1.0, 2.0, 4.0, 5.0, 7.0], [first, second], step=8) == pytest.approx(
        {
            "actor/mismatch_kl": 3.8,
            "actor/mismatch_kl/vllm/1": 1.0,
            "actor/mismatch_kl/vllm/0": 3.0,
            "actor/mismatch_kl/sglang/0": 6.0,
        }
    )


def test_samples_that_nobody_signed_count_for_nobody():
    assert told([1.0, 3.0], [sample(2)], step=0) == {"actor/mismatch_kl": 2.0}
    signed = sample(1, TrainSegment(0, 1, "builtin"))
    assert told([1.0, 3.0, 8.0], [sample(2), signed], step=0)["actor/mismatch_kl/builtin/0"] == pytest.approx(8.0)


def test_only_the_same_weights_are_held_to_the_bound():
    metrics = {"actor/mismatch_kl/vllm/0": 0.02, "actor/mismatch_kl/vllm/1": 5.0, "actor/mismatch_kl/sglang/0": 0.01}
    assert mismatch.too_far(metrics, 0.01) == [("vllm", 0.02)]
    assert mismatch.too_far({"actor/mismatch_kl/vllm/0": float("nan")}, 0.01)
    assert mismatch.too_far(metrics, 0.0) == []
