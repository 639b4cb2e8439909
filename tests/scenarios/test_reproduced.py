"""The calibration of the shipped scenarios holds: a few steps of each comparison of `polyrl reproduce`.

Few steps are noisy, so tolerances are wider here than on the pages of docs/results. The whole command, with the
tolerances that count, is the test marked `long`; the dearer of each pair of cases is for `make test-chaos`.
"""

import json
import subprocess
import sys

import pytest

from polyrl.reproduce import measures, published, tail, together
from polyrl.reproduce.names import REPRODUCTIONS
from polyrl.reproduce.playing import Variant, simulate


def played(case, *overrides, seed=0):
    """The case with a few more overrides; the later one counts."""
    return simulate(Variant(case.scenario, (*case.overrides, *overrides)), seed)


def figure(value, case, *overrides):
    return value(played(case, *overrides).measured)


@pytest.mark.parametrize("cap", ["8k", pytest.param("16k", marks=pytest.mark.chaos)])
def test_over_provisioning_shortens_the_rollout_as_published(cap):
    cases = tail.factor_cases(cap)
    seconds = {
        kind: figure(measures.rollout_s, cases[cap, kind, factor], f"run.steps={steps}")
        for kind, factor, steps in (("none", 1.0, 5), ("prompts", 1.25, 10), ("both", 1.25, 10))
    }
    wanted = {kind: tail.published_rollout_s(cap, kind, 1.25) for kind in ("prompts", "both")}
    wanted["none"] = tail.published_rollout_s(cap, "none", 1.0)
    for kind in ("prompts", "both"):
        assert seconds[kind] / seconds["none"] == pytest.approx(wanted[kind] / wanted["none"], rel=0.2)
    assert seconds["both"] < seconds["prompts"]


@pytest.mark.parametrize("cap", ["8k", pytest.param("16k", marks=pytest.mark.chaos)])
def test_everything_on_is_as_much_faster_than_the_synchronous_baseline_as_published(cap):
    cases = tail.speedup_cases(cap)
    base = figure(measures.step_s, cases["baseline"], "run.steps=5")
    full = played(cases["stream"], "run.steps=10")
    assert base == pytest.approx(published.STEP_S[cap]["baseline"], rel=0.1)
    assert base / measures.step_s(full.measured) == pytest.approx(published.SPEEDUPS[cap]["stream"], rel=0.15)
    assert [step.line.kind for step in full.measured] == ["short"] * 4 + ["long"]


def test_the_8b_baseline_trains_the_tokens_a_second_that_it_was_calibrated_on():
    speed = figure(measures.tok_s, Variant("colocated-8b"), "run.steps=5")
    assert speed == pytest.approx(published.TOK_S_8B[0], rel=0.05)


@pytest.mark.parametrize("num_workers", [1, pytest.param(4, marks=pytest.mark.chaos)])
def test_elastic_8b_lands_near_the_published_throughput_and_window(num_workers):
    case = Variant("elastic-8b", (f"fleet.workers={num_workers}", "run.steps=16", "run.warmup_steps=11"))
    steps = played(case).measured
    assert measures.tok_s(steps) == pytest.approx(published.TOK_S_8B[num_workers], rel=0.12)
    assert measures.window_s(steps) == pytest.approx(published.WINDOW_S_8B[num_workers], rel=0.3)


@pytest.mark.chaos
def test_migrating_saves_about_the_published_share_of_the_overhead():
    case = Variant("three-of-six", ("faults.kill_at_s=[200]", "run.steps=13", "faults.kill_step=12"))
    took = {
        name: played(case, *overrides).steps[12].step_s
        for name, overrides in (
            ("undisturbed", ["faults.kill_workers=0"]),
            ("migrated", []),
            ("regenerated", ["fleet_rules.migrate=false"]),
        )
    }
    migrated, regenerated = (took[name] - took["undisturbed"] for name in ("migrated", "regenerated"))
    assert 0 < migrated < regenerated
    assert 1 - migrated / regenerated == pytest.approx(published.MIGRATION_SAVES[200], abs=0.2)


def test_all_together_beats_the_best_single_mechanism_in_tokens_per_second_and_per_dollar():
    cases = together.together_cases()
    all_on = played(cases[together.TOGETHER], "run.steps=16", "run.warmup_steps=5").measured
    for alone in ("elastic", "rewards"):
        steps = played(cases[alone], "run.steps=9", "run.warmup_steps=5").measured
        assert measures.tok_s(all_on) > 1.2 * measures.tok_s(steps)
        assert measures.tok_per_usd(all_on) > 1.1 * measures.tok_per_usd(steps)


def test_racing_samples_trains_shorter_answers_than_racing_prompts():
    cases = tail.factor_cases("16k")
    natural = figure(measures.trained_length, cases["16k", "none", 1.0], "run.steps=10")
    prompts = figure(measures.trained_length, cases["16k", "prompts", 1.25], "run.steps=10")
    both = figure(measures.trained_length, cases["16k", "both", 1.25], "run.steps=10")
    assert both < prompts < natural
    assert both / natural == pytest.approx(published.EARLIER_BIAS["race"], abs=0.1)


@pytest.mark.long
@pytest.mark.timeout(6000)
def test_every_published_figure_is_within_its_tolerance():
    command = [sys.executable, "-m", "polyrl", "reproduce", *REPRODUCTIONS, "--json", "--no-progress"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=5900, check=False)
    outside = [
        f"{section['name']}, {check['table']}: {check['name']}: {check['ours']:.3g}, published {check['published']:.3g}"
        for section in json.loads(ended.stdout)
        for check in section["checks"]
        if check["holds"] is False
    ]
    assert outside == []
    assert ended.returncode == 0
