"""The folder of `--out`: empty or new, made with its first file. Where a file cannot be written, none is left."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from polyrl.config import dump_toml
from polyrl.disk import remove_files
from polyrl.errors import UserError
from polyrl.journal.files import FILE_NAME, JournalWriter
from polyrl.sim.result import Result, to_json
from polyrl.sim.simulation import Simulation


class OutFolder:
    """Raises UserError for a name that nothing may be written to, here and in every method."""

    def __init__(self, name: str) -> None:
        self._path = Path(name)
        if self._path.is_dir():
            if any(self._path.iterdir()):
                raise UserError(f"--out: {name} exists and is not empty; nothing is written over, name a new folder")
        elif self._path.exists():
            raise UserError(f"--out: {name} is a file, expected a folder or a new name")

    def __str__(self) -> str:
        return f"{self._path}: {', '.join(sorted(path.name for path in self._path.iterdir()))}"

    def play(self, sim: Simulation, on_step: Callable[[int], None] | None) -> None:
        """Play a simulation to its end and keep its journal, made with the first record."""
        journal: JournalWriter | None = None

        def append(record: bytes) -> None:
            nonlocal journal
            if journal is None:
                self._make()
                about = {"scenario": sim.scenario.name, "seed": str(sim.seed)}
                journal = JournalWriter(self._path / FILE_NAME, sim.config, about)
            journal.append_encoded(record)

        sim.watch = append
        with self._writing():
            try:
                sim.run(on_step)
            finally:
                if journal is not None:
                    journal.close()

    def write_result(self, sim: Simulation, result: Result) -> None:
        files = {
            "result.json": to_json(result).encode() + b"\n",
            "steps.jsonl": b"".join(msgspec.json.encode(line) + b"\n" for line in sim.lines),
            "scenario.toml": dump_toml(sim.scenario).encode(),
        }
        from polyrl.sim.pictures import draw_all

        self.write(files, lambda folder: draw_all(sim, folder))

    def write(self, files: Mapping[str, bytes], draw: Callable[[Path], object]) -> None:
        """Write files, then draw. Raises NoPlottingError if matplotlib is missing, with the files written."""
        self._make()
        with self._writing():
            for name, content in files.items():
                (self._path / name).write_bytes(content)
            draw(self._path)

    def _make(self) -> None:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out: cannot make {self._path}: {error.strerror}") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remove_files(self._path)
            raise UserError(f"--out: cannot write to {self._path}: {error.strerror or error}") from error
