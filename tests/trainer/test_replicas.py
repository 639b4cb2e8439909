"""Replicas train on different groups and meet once a step; ranks of a context divide the tokens of samples: the same
gradients, metrics and weights as one rank."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.processes import made_once, run_module
from tests.trainer.ranks_at_work import Recording, make_crew, make_models, samples, two_steps
from tests.trainer.replicas_at_work import OTHERS, SETTINGS, case_of
from tests.trainer.test_ranks import apart, part

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def folder(setting: str, tmp_path_factory) -> Path:
    """What all ranks left, of this setting and those that are played with it."""
    settings = OTHERS if setting in OTHERS else [one for one in SETTINGS if one not in OTHERS]
    return made_once(tmp_path_factory.getbasetemp(), f"replicas {settings[0]}", partial(play, settings))


def play(settings: Sequence[str], place: Path) -> None:
    make_models(place)
    run_module("tests.trainer.replicas_at_work", str(place), *settings)


@pytest.mark.parametrize(
    ("setting", "case"),
    [
        pytest.param(name, case, marks=[pytest.mark.chaos] if name in OTHERS else [])
        for name, (*_, cases) in SETTINGS.items()
        for case in cases
        if case != "nothing"
    ],
)
def test_replicas_have_the_gradients_metrics_and_weights_of_one_rank(folder: Path, setting: str, case: str):
    config, shape = case_of(case)
    learner = make_crew(folder, None, config, shape)
    metrics = two_steps(learner.steps, samples(folder, shape))
    found = load_file(folder / setting / f"{case}.safetensors")
    half = shape.get("dtype") == "bfloat16"
    assert isinstance(learner.optimizer, Recording) and learner.optimizer.first
    assert apart(part(found, "first/"), learner.optimizer.first) < (2e-2 if half else 2e-5)
    state = learner.state()
    for kind in ("policy/", "critic/"):
        if part(state, kind):
            moments = f"{kind}exp_avg/"
            assert apart(part(found, moments), part(state, moments)) < (5e-2 if half else 1e-4)
            assert apart(part(found, f"{kind}master/"), part(state, f"{kind}master/")) < (1e-3 if half else 1e-5)
    told = json.loads((folder / setting / f"{case}.json").read_text())
    assert told.keys() == metrics.keys()
    for name, value in metrics.items():
        if name != "perf/micro_batches":
            assert told[name] == pytest.approx(value, rel=5e-2 if half else 2e-4, abs=5e-3 if half else 2e-6), name


@pytest.mark.parametrize("setting", ["2 of 1"])
def test_a_step_without_samples_moves_no_replica(folder: Path, setting: str):
    config, shape = case_of("nothing")
    learner = make_crew(folder, None, config, shape)
    found = part(load_file(folder / setting / "nothing.safetensors"), "policy/master/")
    assert all(torch.equal(found[name], one) for name, one in learner.policy.parameters().items())
