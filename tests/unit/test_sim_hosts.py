"""Scenarios with environments: the laws, what a death costs, what engines reuse, what is counted, what is refused."""

import pytest
from tests.unit.agents import TROUBLE, play_agents, write_agents

from polyrl.errors import ConfigError
from polyrl.ids import SampleId
from polyrl.scheduling.invariants import check
from polyrl.scheduling.parts import turns
from polyrl.sim.library import load_scenario
from polyrl.sim.machines import KeptContexts
from polyrl.sim.simulation import Simulation, StuckError


@pytest.mark.parametrize("seed", [0, 1])
def test_the_laws_hold_while_hosts_and_workers_die_and_environments_fail(tmp_path, seed):
    sim = Simulation(load_scenario(str(write_agents(tmp_path)), list(TROUBLE)), seed)

    def look(_: bytes) -> None:
        if sim.num_events % 10 == 0:
            check(sim.scheduler, sim.now)

    sim.watch = look
    sim.run()
    ledger = sim.scheduler.desk.ledger
    assert sim.law_violations == []
    assert sum(line.num_losses for line in ledger.hosts.values()) > 0
    assert {"scored", "failed", "timed_out"} <= set(ledger.episodes_ended)
    assert ledger.tokens_discarded["environment_lost"] > 0
    assert ledger.samples_trained == 3 * 8 * 4


def test_the_same_seed_gives_the_same_journal_and_another_one_another(tmp_path):
    digests = [play_agents(tmp_path, *TROUBLE, seed=seed)[0].digest.hex() for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


def test_a_death_of_a_host_costs_no_token_where_the_environment_repeats_itself(tmp_path):
    deaths = ("hosts.mean_life_s=90.0",)
    sim, result = play_agents(tmp_path, *deaths)
    undisturbed, calm = play_agents(tmp_path)
    assert result.episodes is not None and calm.episodes is not None
    assert result.episodes.host_losses > 0
    assert result.episodes.begun > calm.episodes.begun == 3 * 8 * 4
    assert result.tokens.discarded == {}
    assert result.tokens.generated == calm.tokens.generated
    assert sim.scheduler.desk.ledger.num_calls < undisturbed.scheduler.desk.ledger.num_calls * 1.5


def test_a_death_of_a_host_costs_the_later_calls_where_no_result_is_the_same(tmp_path):
    _, result = play_agents(tmp_path, "hosts.mean_life_s=90.0", "domains.tools.environment.replay_share=0.0")
    assert result.tokens.discarded["environment_lost"] > 0
    assert result.tokens.generated == result.tokens.trained + sum(result.tokens.discarded.values()) + result.tokens.open


def test_a_next_call_prefills_only_what_is_new_while_its_context_is_kept(tmp_path):
    one = ("fleet.workers=1", "run.max_staleness=0")
    _, roomy = play_agents(tmp_path, *one)
    _, narrow = play_agents(tmp_path, *one, "parallelism.memory_gb=16.5")
    assert roomy.episodes is not None and narrow.episodes is not None
    assert roomy.episodes.prefix_reuse == 1.0
    assert narrow.episodes.prefix_reuse is not None
    assert narrow.episodes.prefix_reuse < 0.95
    assert narrow.rollout_s.mean > roomy.rollout_s.mean


def test_an_environment_that_never_ends_is_over_time_and_scored(tmp_path):
    limit = ("domains.tools.reward.endless_share=0.3", "environments.turn_timeout_s=30.0")
    _, result = play_agents(tmp_path, *limit)
    assert result.episodes is not None
    assert set(result.episodes.ended) == {"scored", "timed_out"}
    assert sum(result.episodes.ended.values()) == 3 * 8 * 4


def test_a_limit_of_episodes_is_learned_and_stops_none_that_is_only_slower_than_most(tmp_path):
    quick = "domains.tools.environment.tool_quantiles=[[0.0,0.2],[0.9,1.0],[1.0,3.0]]"
    sim, result = play_agents(tmp_path, "run.steps=8", "environments.episode_timeout_s=150.0", quick)
    limit_s = turns.present_episode_limit_s(sim.scheduler.desk, 0, sim.now)
    slowest_s = sim.scheduler.desk.state.plays[0].within_s(1.0)
    assert slowest_s is not None
    assert slowest_s < limit_s < 150.0
    assert result.episodes is not None
    assert result.episodes.ended == {"scored": 8 * 8 * 4}


def test_hosts_that_hang_are_given_up_and_their_episodes_end_elsewhere_with_their_own_reward(tmp_path):
    trouble = ("hosts.mean_time_to_hang_s=300.0", "environments.turn_timeout_s=40.0", "hosts.processes=4")
    sim, result = play_agents(tmp_path, *trouble)
    assert sim.scheduler.ledger.hosts_hung > 0
    assert result.episodes is not None
    assert result.episodes.ended["scored"] > 0.9 * 3 * 8 * 4, "only one that hung at two hosts is taken for the cause"


def test_a_number_of_calls_ends_every_episode_that_would_go_on(tmp_path):
    _, result = play_agents(tmp_path, "environments.max_calls=2")
    assert result.episodes is not None
    assert result.episodes.ended == {"scored": 3 * 8 * 4}
    assert result.episodes.calls <= 2 * 3 * 8 * 4


SLOW_TASKS = (
    "run.steps=12",
    "run.warmup_steps=3",
    "domains.tools.num_prompts=24",
    "domains.tools.correlation=0.0",
    "domains.tools.environment.tool_correlation=0.95",
    "domains.tools.environment.call_quantiles=[[0.0,3],[1.0,3]]",
    "domains.tools.environment.tool_quantiles=[[0.0,0.5],[0.7,1.0],[0.85,40.0],[1.0,60.0]]",
    "rounds.tail_batching=predicted",
    "rounds.prompt_factor=1.5",
)
"""Tasks of which some have slow tools, in every epoch the same; what the policy writes is no sign of it."""


def test_tail_batching_by_seconds_puts_tasks_with_slow_tools_together_and_by_tokens_cannot(tmp_path):
    def long_rounds(by: str) -> tuple[float, float]:
        sim, result = play_agents(tmp_path, *SLOW_TASKS, f"rounds.episode_length={by}")
        history = sim.scheduler.desk.state.tail.history
        assert history, "predicted"
        return result.step_time_s.mean, result.step_time_s.p50

    (tokens_s, _), (seconds_s, half_s) = long_rounds("tokens"), long_rounds("seconds")
    assert seconds_s < 0.9 * tokens_s
    assert half_s < 0.7 * tokens_s, "most rounds have no slow task in them"


def test_adaptive_factors_are_chosen_from_times_where_episodes_are_long_by_them(tmp_path):
    modes = ("rounds.tail_batching=prompts", "rounds.adaptive=true", "rounds.episode_length=seconds")
    slow = [one for one in SLOW_TASKS if not one.startswith("rounds.")]
    sim, _ = play_agents(tmp_path, *slow, *modes)
    state = sim.scheduler.desk.state
    assert state.durations.num_observed >= 300
    typical_s = state.durations.quantile(0.5) / 100
    assert 5.0 < typical_s < 200.0


def test_too_few_places_make_episodes_wait_and_steps_longer(tmp_path):
    _, enough = play_agents(tmp_path)
    _, few = play_agents(tmp_path, "hosts.processes=1", "hosts.slots=4")
    assert enough.episodes is not None and few.episodes is not None
    assert few.episodes.waiting_for_host > 10 > enough.episodes.waiting_for_host
    assert few.episodes.most_hosted == 4
    assert few.step_time_s.mean > 2 * enough.step_time_s.mean


def test_the_price_of_hosts_is_part_of_the_bill(tmp_path):
    sim, result = play_agents(tmp_path, "hosts.mean_life_s=100.0")
    cost, episodes = result.cost, result.episodes
    assert episodes is not None
    assert cost.usd == pytest.approx(cost.trainer_usd + cost.workers_usd + cost.hosts_usd)
    assert cost.hosts_usd == pytest.approx(episodes.host_hours * 1.0)
    assert 0.0 < episodes.hosts < 2.0
    assert sim.episode_times is not None
    whole = sim.episode_times.within(0, 3).usd
    assert whole == pytest.approx(sum(line.usd for line in sim.scheduler.desk.ledger.hosts.values()), rel=0.02)


MIXED = """\

[[domains]]
name = "maths"
prompts_per_step = 2
length_quantiles = [[0.0, 100], [1.0, 900]]

[[domains]]
name = "maze"
prompts_per_step = 2
length_quantiles = [[0.0, 100], [1.0, 900]]
environment = { call_quantiles = [[0.0, 2], [1.0, 5]], failure_share = 0.2 }

[[domains]]
name = "shop"
prompts_per_step = 2
length_quantiles = [[0.0, 100], [1.0, 900]]
environment = { call_quantiles = [[0.0, 1], [1.0, 3]] }
"""


def test_domains_with_and_without_environments_share_a_run_and_each_has_its_own_hosts(tmp_path):
    path = write_agents(tmp_path)
    path.write_text(path.read_text().partition("[domains.tools]")[0] + MIXED)
    sim = Simulation(load_scenario(str(path), ["hosts.mean_life_s=60.0"]))
    sim.run()
    ledger = sim.scheduler.desk.ledger
    assert sim.law_violations == []
    assert ledger.samples_trained == 3 * 6 * 4
    assert set(ledger.hosts) == {"maze-1", "maze-2", "shop-1", "shop-2"}
    assert ledger.episodes_ended["scored"] == 3 * 4 * 4
    assert ledger.episodes_ended["failed"] > 0


def test_a_scenario_without_environments_says_nothing_of_them(tmp_path):
    sim = Simulation(load_scenario("elastic-8b", ["run.steps=1"]))
    assert sim.episode_times is None
    assert sim.config.domains[0].environment == ""


def test_a_run_whose_episodes_find_no_end_says_who_waits(tmp_path):
    with pytest.raises(StuckError, match=r"\d+ wait for a host, \d+ for their environment"):
        play_agents(tmp_path, "hosts.slots=1", "run.max_time_s=10.0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("domains.tools.environment.call_quantiles=[[0.0,4],[1.0,2]]", "environment.call_quantiles.1"),
        ("domains.tools.environment.tool_quantiles=[[0.5,4]]", "environment.tool_quantiles: expected at least two"),
        ("domains.tools.environment.begin_s=700.0", "environments.turn_timeout_s: expected more than 700"),
        ("domains.tools.environment.tool_tokens=1000000", "engine.kv_tokens: expected room"),
        ("hosts.processes=0", "hosts.processes"),
        ("hosts.slot=3", "did you mean hosts.slots"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused(tmp_path, change, words):
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        load_scenario(str(write_agents(tmp_path)), [change])


def test_contexts_are_kept_while_there_is_room_and_the_oldest_goes_first():
    kept = KeptContexts()
    for sample in (1, 2, 3):
        kept.keep(SampleId(sample), 100)
    assert kept.take(SampleId(1), 250.0) == 0
    assert kept.take(SampleId(2), 250.0) == 100
    assert kept.take(SampleId(2), 250.0) == 0
    kept.keep(SampleId(3), 130)
    assert kept.take(SampleId(3), 130.0) == 130
    kept.keep(SampleId(4), 10)
    kept.clear()
    assert kept.take(SampleId(4), 1e9) == 0
