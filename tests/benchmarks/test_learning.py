"""benchmarks/learning.py and grid.py: what they make of runs, and which are done again. The runs are made up here."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.grid import ARITHMETIC

from benchmarks import grid, learning
from polyrl.errors import UserError

NUM_STEPS = 8


def write_run(runs: Path, variant: str, seed: int, better: float = 0.0) -> Path:
    folder = runs / variant / f"seed-{seed}"
    (folder / "run").mkdir(parents=True)
    lines = []
    for step in range(NUM_STEPS):
        line = {
            "step": step, "reward/mean": 0.1 * step + 0.01 * seed + better, "time/step_total": 2.0,
            "fleet/workers": 1.0, "tokens/kept": 75, "tokens/discarded/speculation": 25,
            "bias/trained_mean_length": 9.0, "bias/generated_mean_length": 10.0,
            "staleness/mean": 0.5, "staleness/max": 1,
            "staleness/mixed_samples": 0.1, "rounds/long": 0,
            "bias/inclusion_by_bin/6": 0.5, "bias/inclusion_by_bin/3": 0.7,
        }  # fmt: skip
        lines.append(line | ({"validation/pass@1": 0.3} if step == 0 else {}))
    lines.append({"step": NUM_STEPS, "validation/pass@1": 0.8 + better})
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / grid.OUTCOME).write_text(
        json.dumps(
            {
                "settings": grid.settings_of(ARITHMETIC, variant, seed, runs / "model"),
                "wall_s": 1.0,
                "commit": "c",
                "machine": "m",
            }
        )
    )
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in range(3):
        write_run(tmp_path, "synchronous", seed)
        write_run(tmp_path, "async-1", seed, better=-0.2 + 0.001 * seed)
        write_run(tmp_path, "streaming", seed, better=0.1 * (seed - 1))
    return tmp_path


def test_a_run_becomes_a_curve_over_steps_seconds_and_dollars(runs: Path):
    curve = grid.read_curve(runs / "synchronous" / "seed-0")
    assert curve.reward == pytest.approx([0.1 * step for step in range(NUM_STEPS)])
    assert curve.seconds[-1] == 2.0 * NUM_STEPS
    assert curve.cents[-1] == pytest.approx(100 * 16.0 * (grid.TRAINER_USD + grid.WORKER_USD) / 3600)
    assert curve.validation == {0: 0.3, NUM_STEPS: 0.8}
    assert (curve.length, curve.ended_length, curve.inclusion, curve.discarded) == (9.0, 10.0, {6: 0.5, 3: 0.7}, 0.25)
    assert curve.tokens == [100.0 * (step + 1) for step in range(NUM_STEPS)]


def test_only_a_difference_beyond_its_confidence_is_called_one(runs: Path):
    found = grid.read_all(ARITHMETIC, runs, runs / "model")
    verdicts = {row[0]: row[-1] for row in learning.learned(found)}
    assert verdicts == {"": "", "synchronous": "", "streaming": "within noise", "async-1": "worse"}
    assert grid.verdict([0.3]) == "one seed tells nothing"
    assert grid.spread([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)


def test_the_page_has_every_variant_that_is_there_and_its_pictures(runs: Path, tmp_path: Path):
    out = tmp_path / "page" / "learning.md"
    learning.write(ARITHMETIC, grid.read_all(ARITHMETIC, runs, runs / "model"), runs, out, "the command")
    page = out.read_text()
    assert all(page.count(f"| {name} ") == 3 for name in ("synchronous", "streaming", "async-1"))
    assert "race" not in [line.split()[1] for line in page.splitlines() if line.startswith("| ")]
    said = "by validation at the end: within noise: streaming; worse: async-1 (-0.199 +- 0.002). "
    assert f"{said}By reward over the last" in page
    assert page.count("worse: async-1 (-0.199") == 2
    assert "9 runs" in page and "`the command`" in page
    assert (out.parent / "learning.png").read_bytes().startswith(b"\x89PNG") and "(learning.png)" in page


def test_what_was_written_above_the_figures_stays_and_a_page_has_a_picture_of_its_own_name(runs: Path, tmp_path: Path):
    out = tmp_path / "page" / "stale.md"
    out.parent.mkdir()
    out.write_text("# Stale samples\n\nWords of ours.\n\n" + learning.ABOUT + "\n\nold figures\n")
    learning.write(ARITHMETIC, grid.read_all(ARITHMETIC, runs, runs / "model"), runs, out, "the command")
    page = out.read_text()
    assert page.startswith("# Stale samples\n\nWords of ours.\n\nThe arithmetic task") and "old figures" not in page
    assert (out.parent / "stale.png").is_file() and "(stale.png)" in page


def test_without_runs_to_compare_with_a_line_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path, "streaming", 0)
    learning.write(ARITHMETIC, grid.read_all(ARITHMETIC, tmp_path, tmp_path / "model"), tmp_path, None, "the command")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(
        "nothing to compare; that takes a run of `synchronous` and one of another variant, of the same seed."
    )


def test_a_run_is_done_again_only_if_it_was_another(runs: Path):
    folder = runs / "streaming" / "seed-0"
    settings = grid.settings_of(ARITHMETIC, "streaming", 0, runs / "model")
    assert grid.is_done(folder, settings) and not grid.is_done(folder, ("y",))
    assert not grid.is_done(runs / "streaming" / "seed-9", settings)


def test_a_run_of_other_settings_is_not_on_the_page(runs: Path):
    other = ARITHMETIC._replace(variants={"streaming": ("train.mode=streaming", "rounds.extra=1")})
    assert sorted(grid.read_all(ARITHMETIC, runs, runs / "model")["streaming"]) == [0, 1, 2]
    assert grid.read_all(ARITHMETIC, runs, runs / "moved elsewhere").keys() == {"synchronous", "streaming", "async-1"}
    assert grid.read_all(other, runs, runs / "model") == {}


def test_runs_at_once_have_cores_of_their_own():
    seen: list[Sequence[int]] = []

    def run(cores: Sequence[int]) -> str | None:
        seen.append(cores)
        return f"on {cores[0]}" if cores[0] else None

    wrong = grid.play_all([run] * 5, [0, 1, 2, 3, 4], 2)
    assert len(seen) == 5 and {tuple(one) for one in seen} <= {(0, 1), (2, 3)}
    assert wrong == ["on 2"] * sum(one[0] == 2 for one in seen)
    assert grid.play_all([run], [0], 3) == []


@pytest.mark.parametrize("text", ["", "a", "0-", "5-1", "0-99", "-1"])
def test_seeds_that_make_no_sense_are_refused(text: str):
    with pytest.raises(UserError, match="--seeds"):
        grid.parse_seeds(text)
