"""Every case of cases.toml, for the trainer that CONFORMANCE_TRAINER names as module:class; without it for PolyRL's.

And every case of served.toml, for the server that CONFORMANCE_SERVER names; without both for PolyRL's.
"""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest

from .adapter import (
    Case,
    CaseEpisode,
    CaseSequence,
    ConformingServer,
    ConformingTrainer,
    ServedCase,
    exact,
    read_cases,
    read_served_cases,
)

CASES = read_cases()
SERVED = read_served_cases()
CLOSE = 5e-6
"""How far an advantage may be from the figure of the case: trainers divide by a deviation plus some small number."""


def all_of(has: str) -> "pytest.MarkDecorator":
    chosen = [case for case in CASES if any(getattr(one, has) for one in case.episodes)]
    return pytest.mark.parametrize("case", chosen, ids=[case.name for case in chosen])


@pytest.fixture(scope="module")
def trainer() -> ConformingTrainer:
    return _find(os.environ.get("CONFORMANCE_TRAINER", f"{__package__}.ours:PolyrlTrainer"))()


@pytest.fixture
def make_server() -> Callable[[list[list[int]]], ConformingServer]:
    named = os.environ.get("CONFORMANCE_SERVER")
    if named is None and "CONFORMANCE_TRAINER" in os.environ:
        pytest.skip("CONFORMANCE_SERVER names no server that answers requests")
    return _find(named or f"{__package__}.our_front:PolyrlFront")


def _find(named: str) -> Any:
    module, _, name = named.partition(":")
    return getattr(import_module(module), name)


@all_of("sequences")
def test_each_drawn_token_is_trained_once_in_its_own_context(trainer: ConformingTrainer, case: Case):
    found = trainer.sequences(case.episodes)
    assert [_as_cases(one) for one in found] == [one.sequences for one in case.episodes], case.wrong


@all_of("advantages")
def test_episodes_are_compared_each_once(trainer: ConformingTrainer, case: Case):
    for name in dict.fromkeys(name for one in case.episodes for name in one.advantages):
        expected = [None if one.failed else one.advantages[name] for one in case.episodes]
        found = trainer.advantages(name, case.episodes)
        assert [one is None for one in found] == [one is None for one in expected], case.wrong
        for mine, its in zip(found, expected, strict=True):
            assert mine is None or mine == pytest.approx(its, abs=CLOSE), f"{name}: {case.wrong}"


@all_of("weights")
def test_an_episode_has_its_weight_whatever_its_turns(trainer: ConformingTrainer, case: Case):
    for aggregation in dict.fromkeys(name for one in case.episodes for name in one.weights):
        found = trainer.weights(aggregation, case.episodes)
        masks = trainer.sequences(case.episodes)
        for one, its_weights, its_masks in zip(case.episodes, found, masks, strict=True):
            if one.failed:
                assert its_weights is None
                continue
            weight = exact(one.weights[aggregation])
            assert its_weights is not None and its_masks is not None
            for weights, (_, trained) in zip(its_weights, its_masks, strict=True):
                expected = [weight if bit == "1" else 0.0 for bit in trained]
                assert weights == pytest.approx(expected, rel=1e-6), f"{aggregation}: {case.wrong}"


@pytest.mark.parametrize("case", [one for one in CASES if one.mean_reward is not None], ids=lambda case: case.name)
def test_the_mean_reward_is_over_episodes(trainer: ConformingTrainer, case: Case):
    assert trainer.mean_reward(case.episodes) == pytest.approx(case.mean_reward, abs=CLOSE), case.wrong


@pytest.mark.parametrize("case", SERVED, ids=[case.name for case in SERVED])
def test_requests_are_answered_and_each_answer_is_trained_in_its_episode(
    trainer: ConformingTrainer, make_server: Callable[[list[list[int]]], ConformingServer], case: ServedCase
):
    server = make_server(case.draws)
    try:
        refused = tuple(at for at, session in enumerate(case.opens) if not server.open(session))
        assert refused == case.refused, case.wrong
        for one in case.requests:
            assert server.ask(one.session, one.saw, one.retry) == one.got, case.wrong
    finally:
        calls = server.close()
    found = trainer.sequences([CaseEpisode(calls[session]) for session in case.trained])
    assert calls.keys() == case.trained.keys(), case.wrong
    assert [_as_cases(one) for one in found] == list(case.trained.values()), case.wrong


def test_every_case_expects_something_and_has_a_name_of_its_own():
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({case.name for case in SERVED}) == len(SERVED)
    for case in CASES:
        assert any(one.sequences or one.advantages or one.weights for one in case.episodes), case.name
        for one in case.episodes:
            trained = None if one.sequences is None else sum(each.trained.count("1") for each in one.sequences)
            assert trained in (None, sum(len(call.drew) for call in one.calls if call.paid)), case.name


def _as_cases(found: Sequence[tuple[Sequence[int], str]] | None) -> list[CaseSequence] | None:
    return None if found is None else [CaseSequence(list(tokens), trained) for tokens, trained in found]
