"""The way of an episode: its calls, its tokens and its tools are facts of the episode, not of the attempt."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrl.sim.environment_model import EnvironmentModel
from polyrl.sim.reward_model import ModelledRewards
from polyrl.sim.scenario import SimDomainSection, SimEnvironmentSection

QUANTILES = [(0.0, 1.0), (0.5, 4.0), (1.0, 20.0)]


def model(seed=0, **changes) -> EnvironmentModel:
    environment = SimEnvironmentSection(call_quantiles=QUANTILES, tool_quantiles=QUANTILES, **changes)
    domain = SimDomainSection(
        name="tools", prompts_per_step=1, length_quantiles=[(0.0, 1), (1.0, 9)], environment=environment
    )
    return EnvironmentModel([domain], ModelledRewards([domain], seed), seed)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5), st.integers(0, 10_000), st.integers(0, 7), st.integers(1, 5000))
def test_every_call_draws_a_token_and_all_of_them_what_the_workload_says(seed, prompt, index, total):
    script = model(seed).script((0, prompt, 0, index), total)
    assert script.ends[-1] == total
    assert all(earlier < later for earlier, later in zip((0, *script.ends), script.ends, strict=False))
    assert 1 <= len(script.ends) <= min(20, total)
    assert len(script.tools_s) == len(script.ends)
    assert all(1.0 <= seconds <= 20.0 for seconds in script.tools_s[:-1])


def test_calls_and_tools_spread_as_their_quantiles_say():
    scripts = [model().script((0, prompt, 0, 0), 1000) for prompt in range(2000)]
    calls = sorted(len(script.ends) for script in scripts)
    assert calls[0] == 1 and 3 <= calls[1000] <= 5 and calls[-1] >= 19
    seconds = sorted(one for script in scripts for one in script.tools_s[:-1])
    assert seconds[len(seconds) // 2] == pytest.approx(4.0, rel=0.1)


def test_an_episode_takes_the_same_way_whenever_it_is_asked():
    assert model().script((0, 3, 0, 1), 900) == model().script((0, 3, 0, 1), 900)
    assert model().script((0, 3, 0, 1), 900) != model(seed=1).script((0, 3, 0, 1), 900)


def test_the_share_of_attempts_that_fail_is_the_one_asked_for_and_differs_by_attempt():
    shaky = model(failure_share=0.3)
    fails = [shaky.fails_before((0, prompt, 0, 0), attempt, 4) for prompt in range(500) for attempt in (1, 2)]
    assert sum(one is not None for one in fails) == pytest.approx(300, rel=0.15)
    assert {one for one in fails if one is not None} == {0, 1, 2, 3, 4}
    assert all(model().fails_before((0, prompt, 0, 0), 1, 4) is None for prompt in range(100))


def test_the_first_call_is_always_the_same_and_others_by_their_share():
    never = model(replay_share=0.0)
    assert never.is_the_same((0, 1, 0, 0), 2, 0)
    assert not never.is_the_same((0, 1, 0, 0), 2, 1)
    assert model().is_the_same((0, 1, 0, 0), 2, 1)
