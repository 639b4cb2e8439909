"""Sections of `polyrl reproduce` compare what comes back, wherever it was played; the command says what cannot be."""

import json

import pytest

from polyrl.cli.main import main
from polyrl.ids import Step
from polyrl.reproduce import elastic, losses, measured
from polyrl.reproduce.comparing import Section, relative
from polyrl.reproduce.emulation.beside import Beside
from polyrl.reproduce.names import PLACES, REPRODUCTIONS
from polyrl.reproduce.page import Provenance, misfits, page
from polyrl.reproduce.picture import draw
from polyrl.reproduce.playing import Played, Timed, Variant
from polyrl.scheduling.core.ledger import StepLine
from polyrl.sim.result import Measured

STEPS_A_LEVEL = 10


def step(number: int, step_s: float, workers: float = 2.0) -> Measured:
    line = StepLine(
        step=Step(number),
        kind="long" if number % 5 == 4 else "short",
        opened_at=number * step_s,
        closed_at=(number + 0.5) * step_s,
        trained_at=(number + 1) * step_s,
        step_s=step_s,
        num_groups=8,
        num_samples=64,
        tokens_trained=64_000,
        tokens_discarded={"lost": 640},
        longest=4000,
        trained_mean=1000.0,
        generated_mean=1000.0,
        inclusion_by_length=(),
        wait_train_s=0.0,
        wait_remote_s=0.0,
        train_s=20.0,
        seed_window_s=100.0,
        seed_window_why="",
        mean_workers=workers,
        num_moves=0,
        usd=float(number),
    )
    return Measured(line, step_s, step_s / 2, 100_000, 1.0)


class Made:
    """A player whose steps are made up: those of one case differ from another's in their time alone."""

    def __init__(self) -> None:
        self.cases: list[Variant] = []

    def play(self, cases, at_least=1):
        self.cases += cases.values()
        return {key: [self._played(case)] * max(2, at_least) for key, case in cases.items()}

    def _played(self, case: Variant) -> Played:
        step_s = 100.0 + sum(map(ord, "".join(case.overrides))) % 97
        levels = [level for level in elastic.LEVELS for _ in range(STEPS_A_LEVEL)]
        return Played([step(number, step_s, workers) for number, workers in enumerate(levels)], 0)


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_every_name_plays_cases_of_shipped_scenarios_and_makes_a_page(name, tmp_path):
    player = Made()
    if name == "more-devices":  # it divides by how many tokens more long rounds train
        pytest.skip("made-up rounds all train the same number of tokens")
    section = REPRODUCTIONS[name].simulation(player)
    assert player.cases
    assert section.tables
    written = page(section, Provenance(name, "simulation", f"polyrl reproduce {name}", 2, 1.0, "0123"), [])
    assert f"polyrl reproduce {name}" in written
    assert all(table.title in written for table in section.tables)


EMULATED = {name: one.emulated for name, one in REPRODUCTIONS.items() if not isinstance(one.emulated, str)}


@pytest.mark.parametrize("name", EMULATED)
def test_what_is_emulated_makes_its_section_of_shorter_runs(name):
    short, whole = Made(), Made()
    assert EMULATED[name](short).tables
    REPRODUCTIONS[name].simulation(whole)
    assert len(short.cases) <= len(whole.cases)


def test_what_is_emulated_stands_beside_the_simulator_case_by_case():
    """The simulator is patient with dead workers as the emulated run is, and plays the same seeds."""
    asked: list[tuple[Variant, int]] = []

    def simulate_one(case: Variant, seed: int) -> Played:
        asked.append((case, seed))
        return Played([step(number, 100.0) for number in range(3)], 0)

    class Three:
        def play(self, cases, at_least=1):
            slow = {key: 105.0 if key == ("8k", "near") else 120.0 for key in cases}
            return {key: [Played([step(n, took) for n in range(3)], 0)] * 2 for key, took in slow.items()}

    beside, section = Beside(Three(), 10.0, simulate_one), Section("title", "about")
    beside.play({("8k", "near"): Variant("three-of-six", ("run.steps=3",))})
    beside.tell(section)
    (table,) = section.tables
    assert table.rows == [["8k near", "105", "100", "1.050", ", ".join(["105 (100)"] * 6)]]
    assert section.claims[0].holds
    assert [seed for _, seed in asked] == [0, 1]
    assert asked[0][0].overrides == ("run.steps=3", "fleet_rules.heartbeat_timeout_s=20")

    beside.play({"far": Variant("elastic-8b")})
    beside.tell(section)
    assert "farthest: far, 1.200" in section.claims[1].text and not section.claims[1].holds


def test_a_segment_of_a_market_begins_when_the_window_is_learned():
    steps = [step(number, 100.0) for number in range(20)]
    market = elastic.PlayedMarket(segment_s=1000.0, left_out_s=500.0)
    assert [one.line.step for one in market.segment(Played(steps, 0))] == list(range(5, 15))


def test_steps_in_which_the_fleet_changes_belong_to_no_level():
    workers = [0, 0, 0.4, 1, 1, 1, 1.7, 2, 2, 1.2, 1, 1, 1, 0.1, 0, 0]
    steps = [step(number, 100.0, one) for number, one in enumerate(workers)]
    found = elastic.levels_of(steps, (0, 1, 2, 1, 0))
    assert [(one.workers, one.way) for one in found] == [(0, "up"), (1, "up"), (2, "up"), (1, "down"), (0, "down")]
    assert [len(one.steps) for one in found] == [1, 2, 1, 2, 1]


def test_the_worlds_of_preemptions_and_of_stairs_are_scenarios_that_can_be_loaded():
    from polyrl.sim.library import load_scenario

    for case in (
        elastic.staircase_case((0, 1, 2, 1, 0), 1000.0, 12),
        Variant("elastic-8b", losses.churn(300, 1000, 30)),
    ):
        assert load_scenario(case.scenario, list(case.overrides)).supply.events


def test_a_figure_outside_its_tolerance_is_a_misfit_and_the_section_does_not_hold():
    section = Section("title", "about")
    section.compare("table", [relative("near", 1.0, 1.1, 0.15), relative("far", 1.0, 1.3, 0.15)])
    section.claim("it is so", holds=False)
    assert not section.holds
    assert [one.partition(":")[0] for one in misfits(section)] == ["table", "Does not hold"]


def test_a_section_is_drawn_with_its_curves(tmp_path):
    pytest.importorskip("matplotlib")
    section = REPRODUCTIONS["elastic-8b"].simulation(Made())
    drawn = draw(section, tmp_path / "one.png")
    assert [path.name for path in drawn] == ["one.png", "one-1.png", "one-2.png"]
    assert all(path.stat().st_size > 1000 for path in drawn)


def test_without_a_name_all_are_listed_with_where_they_can_be_played(capsys):
    assert main(["reproduce", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == list(REPRODUCTIONS)
    assert listed["planner"]["on"] == ["simulation"]
    assert set(listed["tail-e2e"]["on"]) == set(PLACES)
    assert main(["reproduce"]) == 0
    assert "tail-e2e" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["planer"], "NAME: 'planer' is unknown; did you mean planner?"),
        (["planner", "--on", "mars"], "--on: 'mars' is no place; expected one of simulation, emulated, gpu"),
        (["planner", "--on", "emulated"], "planner cannot be played on emulated: an emulated engine has no width"),
        (["minimum", "--on", "gpu"], "minimum cannot be played on gpu: no script measures it there"),
        (["tail-e2e", "--on", "gpu", "--seeds", "2"], "--seeds: is not for --on gpu, where each mode is run once"),
        (["minimum", "--seeds", "0"], "--seeds: 0; expected at least 1"),
        (["minimum", "--speedup", "inf"], "--speedup: inf; expected at most 1000: processes do not go that fast"),
        (["minimum", "--out", "/dev/null/x"], "--out: /dev/null/x: no folder can be made there: Not a directory"),
    ],
)
def test_what_cannot_be_played_is_one_line(arguments, line, capsys):
    assert main(["reproduce", *arguments]) == 2
    assert capsys.readouterr().err == f"polyrl: error: {line}\n"


def test_a_gpu_script_is_looked_for_in_the_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "tail-e2e", "--on", "gpu"]) == 2
    assert "is not there; run this in a checkout" in capsys.readouterr().err


def test_what_a_gpu_measured_is_a_page_beside_what_was_published():
    def run_of(mode: str, step_s: float, kinds: str) -> measured.ModeRun:
        steps = [step_s] * len(kinds)
        return measured.ModeRun(
            mode, "a GPU", "qwen3", 32, 8192, steps, list(kinds), step_s, step_s / 2, 3.0, 0.5, 6e3, 60
        )

    runs = {"synchronous": run_of("synchronous", 40.0, "ss"), "tail batching": run_of("tail batching", 20.0, "sl")}
    section = measured.tail_batching(runs)
    assert [round(check.ours, 3) for check in section.checks] == [2.0, 2.0]
    written = page(section, Provenance("tail-e2e", "gpu", "polyrl reproduce tail-e2e --on gpu", 1, 60.0, "0123"), [])
    assert "runs of a case: 1; they took 60 s" in written
    assert "| tail batching | 2     | 20.0    | 20.0    |" in written
    faster = measured.streaming({"synchronous": runs["synchronous"], "streaming": run_of("streaming", 38.0, "ss")})
    assert faster.checks[0].ours == pytest.approx(0.95)


def test_a_section_whose_runs_another_needed_too_says_how_long_they_took():
    class Slow(Made):
        def _played(self, case):
            return super()._played(case)._replace(took_s=3.0)

    shared = Slow()
    took_s = []
    for name in ("tail-e2e", "planner", "planner"):
        timed = Timed(shared)
        REPRODUCTIONS[name].simulation(timed)
        took_s.append(timed.took_s)
    assert took_s[1] == took_s[2] == 2 * 2 * 2 * 3.0, "two cases of two caps, two seeds each"
