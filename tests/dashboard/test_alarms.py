"""An alarm is raised for what it names, and for nothing else."""

import pytest
from msgspec.structs import replace
from tests.unit.test_diagnosis import STATUS, WORKER

from polyrl.dashboard import alarms

STEADY = [0.5] * 30


def names(series: dict[str, list[float]]) -> list[str]:
    return [one.name for one in alarms.of_metrics(series)]


@pytest.mark.parametrize(
    ("metric", "values", "name"),
    [
        ("reward/mean", [0.1] * 5 + [0.8] * 10 + [0.15] * 6, "reward collapsed"),
        ("actor/entropy", [1.0] * 10 + [0.01] * 6, "entropy gone"),
        ("actor/grad_norm", [0.3] * 30 + [9.0], "gradient spike"),
        ("actor/grad_norm", [0.3] * 5 + [0.0] * 5, "nothing learned"),
        ("actor/mismatch_kl", [0.001] * 10 + [0.2] * 6, "mismatch"),
        ("token/response_length/mean", [100.0] * 10 + [900.0] * 6, "length drift"),
        ("token/response_length/mean", [100.0] * 10 + [9.0] * 6, "length drift"),
        ("staleness/mean", [1.0] * 10 + [8.0] * 6, "stale data"),
    ],
)
def test_each_kind_of_trouble_has_its_alarm(metric: str, values: list[float], name: str):
    assert names({metric: values}) == [name]
    assert names({metric: values[:3]}) == [], "a run that has just begun"


def test_a_run_that_learns_raises_none():
    rising = [0.1 + 0.02 * step for step in range(40)]
    noisy = [one + (0.1 if step % 2 else -0.1) for step, one in enumerate(rising)]
    falling = [1.0 - 0.01 * step for step in range(40)]
    assert names({"reward/mean": noisy, "actor/entropy": falling, "actor/grad_norm": STEADY}) == []


def test_a_run_that_learns_nothing_is_told_whether_its_rewards_are_low_or_all_won():
    (found,) = alarms.of_metrics({"actor/grad_norm": [0.0] * 6, "reward/mean": [0.0] * 6, "time/step_total": [2.0] * 6})
    assert "the last 6 steps" in found.what and found.costs == "12.0 s in those steps" and "easier" in found.do
    (found,) = alarms.of_metrics({"actor/grad_norm": [0.3] + [0.0] * 6, "reward/mean": [1.0] * 7})
    assert "the last 6 steps" in found.what and "harder" in found.do
    assert names({"actor/grad_norm": [0.0, 0.3, 0.0, 0.3, 0.0, 0.0]}) == []


def test_answers_that_agree_are_no_trouble_where_all_is_solved():
    gone = {"actor/entropy": [1.0] * 10 + [0.01] * 6}
    assert names({**gone, "reward/mean": [0.1] * 5 + [0.99] * 11}) == []
    assert names({**gone, "reward/mean": [0.1] * 16}) == ["entropy gone"]


def test_text_without_an_end_and_text_that_is_none():
    words = list(range(300))
    loop = words[:20] + [7, 8, 9] * 100
    assert not alarms.is_repeating(words) and alarms.is_repeating(loop)
    assert [one.name for one in alarms.of_answers([loop] * 3 + [words] * 5, ["fine"] * 8)] == ["endless text"]
    assert [one.name for one in alarms.of_answers([words] * 4, ["\ufffd\ufffd\ufffdab"] * 4)] == ["garbled text"]
    assert [*alarms.of_answers([words] * 4, ["caf\ufffd and more text"] * 4)] == []
    assert [*alarms.of_answers([], [])] == []


def test_a_worker_that_writes_half_as_fast_lags_or_is_silent_is_named_and_the_trainers_own_is_not():
    fleet = [replace(WORKER, name=f"w{number}") for number in range(4)]
    slow = replace(WORKER, name="slow", price_usd_per_hour=2.0)
    paces = {**{one.name: 20.0 for one in fleet}, "slow": 4.0}
    behind = replace(WORKER, name="old", version=0)
    silent = replace(WORKER, name="gone", last_heard_s=40.0)
    status = replace(STATUS, workers=(*fleet, slow, behind, silent))
    raised = [*alarms.of_fleet(status, paces)]
    found = {one.name: one.what for one in raised}
    assert found.keys() == {"slow worker", "worker lags", "worker silent"}
    assert (
        "slow" in found["slow worker"]
        and "2 older than is allowed" in found["worker lags"]
        and "40 s" in found["worker silent"]
    )
    assert raised[0].of == "slow" and "5.0 times as long" in raised[0].costs and "$2.00 an hour" in raised[0].costs
    assert [*alarms.of_fleet(replace(STATUS, workers=(*fleet, replace(slow, local=True))), paces)] == []
    assert [*alarms.of_fleet(replace(STATUS, workers=(*fleet[:1], slow)), paces)] == [], "of two, which is slow?"


COLLAPSE = {
    "reward/mean": [0.1] * 5 + [0.8] * 10 + [0.05] * 6,
    "token/response_length/mean": [20.0] * 15 + [90.0] * 6,
    "time/step_total": [1.0] * 21,
}


def test_a_collapse_is_one_verdict_with_its_signs_the_checkpoint_before_it_and_the_command():
    recipe = {"optimizer": {"lr": 0.004}}
    around = alarms.AlarmContext(recipe, "runs/x", checkpoints=[5, 10, 20], last_step=20)
    found = alarms.verdict([*alarms.of_metrics(COLLAPSE, around)], COLLAPSE, around)
    assert [one.name for one in found] == ["run collapsed"]
    (told,) = found
    assert "fell from 0.8 to 0.05" in told.what and "answers have 90 tokens, 20 at the start" in told.what
    assert told.why.endswith("optimizer.lr is 0.004 now") and told.costs.startswith("6.0 s")
    assert "the checkpoint of step 10, the newest before it fell" in told.do
    assert told.run == (
        "polyrl export --step 10 runs/x runs/x-step-10 && polyrl train runs/x/recipe.toml --run-dir runs/x-again "
        "optimizer.lr=0.0004 model.path=runs/x-step-10"
    )
    late = around._replace(checkpoints=[20])
    (told,) = alarms.verdict([*alarms.of_metrics(COLLAPSE, late)], COLLAPSE, late)
    assert "no checkpoint from before it fell is kept" in told.do
    assert told.run == "polyrl train runs/x/recipe.toml --run-dir runs/x-again optimizer.lr=0.0004"


def test_alarms_without_a_collapse_stay_as_they_are():
    longer = {"token/response_length/mean": COLLAPSE["token/response_length/mean"]}
    raised = [*alarms.of_metrics(longer)]
    assert alarms.verdict(raised, longer, alarms.AlarmContext()) == raised


@pytest.mark.parametrize(("share", "helps"), [(0.6, "more or faster workers help"), (0.1, "fewer workers cost less")])
def test_of_stale_data_the_cause_is_named_and_one_remedy_for_the_fleet(share: float, helps: str):
    series = {"staleness/mean": [16.0] * 8, "time/step_total": [2.0] * 8, "cost/usd_step": [0.5] * 8}
    pulling = replace(WORKER, state="pulling", pulling=174)
    status = replace(STATUS, workers=(pulling, replace(WORKER, name="w2")), published=190)
    around = alarms.AlarmContext({"train": {"max_staleness": 16}}, status=status, waits_for_fleet=share)
    (found,) = alarms.of_metrics(series, around)
    assert found.do.startswith("lower train.max_staleness (16 now); ") and helps in found.do
    assert ("more" in found.do) != ("fewer" in found.do)
    assert "max_staleness = 16 allows it" in found.why and "w1 has been pulling version 174" in found.why
    assert "the trainer is 16 versions further" in found.why and "took 10.0 s and $2.50" in found.costs


def test_a_gradient_that_is_no_number_is_told_and_one_that_is_missing_is_not():
    steps = {"reward/mean": [0.5] * 20, "time/step_total": [2.0] * 20}
    broken = {**steps, "actor/grad_norm": [1.0] * 17, "actor/skipped_updates": [0.0] * 17 + [1.0] * 3}
    (found,) = alarms.of_metrics(broken)
    assert found.name == "gradient is no number" and found.what.startswith("3 of the last 5 steps")
    assert found.costs.startswith("6.0 s")
    nothing = {**steps, "actor/grad_norm": [1.0] * 19 + [0.0], "actor/skipped_updates": [0.0] * 19 + [1.0]}
    assert names(nothing) == []
