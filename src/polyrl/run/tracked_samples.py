"""Answers and pictures of a run, for TensorBoard and W&B (telemetry/trackers.py)."""

import tempfile
from pathlib import Path

from polyrl.errors import UserError
from polyrl.run.kept_samples import KeptSample, Texts, of_trained_step
from polyrl.telemetry.canvas import NoPlottingError
from polyrl.telemetry.metrics import FILE_NAME, read_steps
from polyrl.telemetry.sample_tables import SampleRow, shorten_text, spread
from polyrl.telemetry.trackers import Trackers


def show_samples(trackers: Trackers, run_dir: Path, step: int, text_of: Texts) -> None:
    """Give a step's answers to those that show them; nothing where the step's file is not kept."""
    try:
        samples = of_trained_step(run_dir, step)
    except (OSError, UserError):  # the run goes on, and so do its metrics
        return
    if samples:
        trackers.log_samples(step, spread([_row(one, text_of) for one in samples]))


def _row(one: KeptSample, text_of: Texts) -> SampleRow:
    return SampleRow(
        one.step, one.name, one.reward, one.num_drawn, one.finish, shorten_text(text_of(one.prompt)),
        shorten_text(text_of(one.answer)), ", ".join(f"{name} {value:g}" for name, value in one.parts.items()),
    )  # fmt: skip


def show_pictures(trackers: Trackers, run_dir: Path) -> None:
    """Draw what the metrics have, as `polyrl plot` does without the journal; nothing where matplotlib is missing."""
    from polyrl.telemetry.pictures import draw_all
    from polyrl.telemetry.runs import make_run

    try:
        steps = read_steps(run_dir / FILE_NAME)
        with tempfile.TemporaryDirectory() as folder:
            drawn = draw_all([make_run(run_dir.resolve().name, None, steps)], Path(folder)) if steps else []
            if drawn:
                trackers.log_pictures(int(steps[-1]["step"] or 0), drawn)
    except (NoPlottingError, OSError, UserError):
        return
