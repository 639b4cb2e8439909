"""Scenarios that start from another one and change what they name."""

import pytest

from polyrl.errors import ConfigError
from polyrl.sim.library import load_scenario


def extended(tmp_path, change: str):
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "tail-14b-16k"\nname = "mine"\nabout = "a change"\n{change}\n')
    return load_scenario(str(path))


def test_one_key_of_one_domain_is_changed_without_copying_the_others(tmp_path):
    shipped, mine = load_scenario("tail-14b-16k"), extended(tmp_path, "[domains.code]\ncap_share = 0.02")
    assert [one.name for one in mine.domains] == [one.name for one in shipped.domains]
    assert [one.cap_share for one in mine.domains] == [shipped.domains[0].cap_share, 0.02, shipped.domains[2].cap_share]
    assert mine.domains[1].reward == shipped.domains[1].reward


def test_a_key_deep_in_a_domain_is_changed_alone(tmp_path):
    mine = extended(tmp_path, "[domains.code.reward]\nendless_share = 0.1")
    assert mine.domains[1].reward.endless_share == 0.1
    assert mine.domains[1].reward.correct_share == load_scenario("tail-14b-16k").domains[1].reward.correct_share


def test_an_override_names_a_domain():
    assert load_scenario("tail-14b-16k", ["domains.judge.correlation=0.5"]).domains[2].correlation == 0.5


def test_a_domain_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(ConfigError, match=r"domains\.maths: .*expected one of: math, code, judge"):
        extended(tmp_path, "[domains.maths]\ncap_share = 0.02")
    with pytest.raises(ConfigError, match=r"an index from 0 to 2, or a name: math, code, judge"):
        load_scenario("tail-14b-16k", ["domains.maths.cap_share=0.02"])


def test_reward_slots_and_training_go_by_the_number_of_devices():
    twice = load_scenario("tail-7b-8k", ["trainer.num_devices=32", "trainer.local_workers=32", "trainer.scaling=0.5"])
    assert (load_scenario("tail-7b-8k").reward_slots, twice.reward_slots) == (64, 128)
    assert load_scenario("tail-7b-8k").training_speed == 1.0
    assert twice.training_speed == pytest.approx(2**0.5)


@pytest.mark.parametrize("name", ["elastic-8b", "elastic-14b", "synchronous-7b-8k", "synchronous-14b-16k"])
def test_what_fits_into_a_shipped_engine_is_what_the_planner_computes(name):
    scenario = load_scenario(name)
    assert scenario.engine.kv_tokens is None and scenario.parallelism.model is not None
    assert 400_000 < scenario.kv_tokens(scenario.first_width) < 1_000_000
