"""benchmarks/time_to_reward.py: what it makes of runs that are there, TRL's among them. The runs are made up here."""

import json
from pathlib import Path

import pytest
from benchmarks.time_to_reward import CONTESTS, TRL

from benchmarks import grid, time_to_reward
from polyrl.errors import UserError

NUM_STEPS = 8
ARITHMETIC = CONTESTS["arithmetic"]


def write_run(runs: Path, variant: str, seed: int, step_s: float, end: float = 0.9) -> None:
    """Validated before step 0, after 4 steps and after 8: 0.3, and half of the way up, and `end`."""
    folder = runs / variant / f"seed-{seed}"
    folder.mkdir(parents=True)
    rates = {0: 0.3, 4: 0.6, 8: end}
    if variant == TRL:
        settings = time_to_reward.trl_settings(ARITHMETIC, seed)
        steps = range(1, NUM_STEPS + 1)
        found = {"seconds": [step_s * n for n in steps], "tokens": [100 * n for n in steps], "validation": rates}
        (folder / "found.json").write_text(
            json.dumps(found | {"rewards": [0.5] * NUM_STEPS, "lengths": [9.0] * NUM_STEPS})
        )
    else:
        settings = grid.settings_of(ARITHMETIC.grid, variant, seed, runs / "model")
        line = {"reward/mean": 0.5, "time/step_total": step_s, "fleet/workers": 2.0, "tokens/kept": 100}
        line |= {"bias/trained_mean_length": 9.0, "bias/generated_mean_length": 9.0}
        lines = [{"step": step, **line} for step in range(NUM_STEPS)]
        lines += [{"step": step, "validation/pass@1": rate} for step, rate in rates.items()]
        (folder / "run").mkdir()
        (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    grid.finish(folder, settings, 1.0)


def test_an_accuracy_is_reached_between_two_validations_along_a_line(tmp_path: Path):
    write_run(tmp_path, TRL, 0, step_s=2.0)
    curve = time_to_reward.read_trl(tmp_path / TRL / "seed-0")
    assert time_to_reward.reached(curve, curve.seconds, 0.75) == pytest.approx(12.0)
    assert time_to_reward.reached(curve, curve.tokens, 0.45) == pytest.approx(200.0)
    assert time_to_reward.reached(curve, curve.seconds, 0.3) == 0.0
    assert time_to_reward.reached(curve, curve.seconds, 0.95) is None


def test_seconds_are_compared_seed_by_seed_and_who_never_got_there_is_counted(tmp_path: Path):
    for seed in range(2):
        write_run(tmp_path, TRL, seed, step_s=2.0 + seed)
        write_run(tmp_path, "synchronous", seed, step_s=4.0 + 2 * seed)
    write_run(tmp_path, "async-4", 0, step_s=1.0, end=0.7)
    rows = {row[0]: row for row in time_to_reward.table(ARITHMETIC, time_to_reward.read_all(ARITHMETIC, tmp_path))}
    assert rows["synchronous"][5] == "2.00 +- 0.00" and rows[TRL][4] == "0.50 +- 0.00"
    assert rows["async-4"][3] == "-" and rows["async-4"][1] == "1"


def test_a_page_has_a_section_for_what_is_there_and_keeps_own_words(tmp_path: Path):
    write_run(tmp_path, "synchronous", 0, step_s=1.0)
    write_run(tmp_path, TRL, 0, step_s=1.0)
    out = tmp_path / "page.md"
    out.write_text("# Time\n\nMy words.\n\n**How to read it.** old\n")
    text = time_to_reward.section("arithmetic", ARITHMETIC, tmp_path, out, "the command")
    assert "`the command`" in text and "2 runs" in text and "| TRL " in text
    assert (tmp_path / "page-arithmetic.png").read_bytes().startswith(b"\x89PNG")
    assert time_to_reward.own_words(out) == "# Time\n\nMy words."
    with pytest.raises(UserError, match="no run is done"):
        time_to_reward.section("arithmetic", ARITHMETIC, tmp_path / "none", out, "")


def test_trl_gets_the_rows_that_ours_are_validated_on(tmp_path: Path):
    rows = time_to_reward.rows_of(ARITHMETIC, tmp_path, 3)
    assert (len(rows["train"]), len(rows["validation"])) == (128, 128)
    for name in time_to_reward.ROWS:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": f"{name} 1 + 1 =", "answer": "2"}) + "\n")
    (row,) = time_to_reward.rows_of(CONTESTS["chain-sum"], tmp_path, 0)["train"]
    assert row == {"prompt": [{"role": "user", "content": "train 1 + 1 ="}], "expected": "2"}


def test_trl_has_the_settings_of_our_runs():
    for contest in CONTESTS.values():
        ours = dict(one.split("=", 1) for one in contest.grid.settings)
        pairs = {"lr": "optimizer.lr", "steps": "train.steps", "validate_every": "validation.every_steps",
                 "prompts": "data.prompts_per_step", "group": "rounds.samples_per_prompt"}  # fmt: skip
        assert {key: float(contest.trl[key]) for key in pairs} == {key: float(ours[one]) for key, one in pairs.items()}
