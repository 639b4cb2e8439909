"""What is known of the version that was validated last, and what becomes of a file that cannot be read."""

from pathlib import Path

import pytest

from polyrl.telemetry import validated

RATES = {"validation/pass@1": 0.5}


def test_what_is_noted_is_read_and_of_that_version_alone(tmp_path: Path):
    validated.note(tmp_path, 20, RATES)
    assert validated.read(tmp_path, 20) == RATES and validated.read(tmp_path, 21) == {}


@pytest.mark.parametrize("damage", [b"{", b'{"version":20,"rates":{"\xff":1}}', None], ids=["cut", "byte", "folder"])
def test_one_that_cannot_be_read_is_as_good_as_none(tmp_path: Path, damage: bytes | None):
    path = tmp_path / "validated.json"
    path.mkdir() if damage is None else path.write_bytes(damage)
    assert validated.read(tmp_path, 20) == {}
