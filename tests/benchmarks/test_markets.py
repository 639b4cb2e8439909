"""The markets that the autoscaler has not seen: drawn from a seed, within bounds, of three kinds."""

from pathlib import Path

import pytest
from benchmarks.markets import DEMAND, HORIZON_S, KINDS, LEAST, main, write_market

from polyrl.config.supply_trace import read_supply_trace


@pytest.mark.parametrize("kind", KINDS)
def test_a_market_is_drawn_from_its_seed_and_is_a_trace_of_the_simulator(kind: str, tmp_path: Path):
    one, again, other = (tmp_path / name for name in ("one", "again", "other"))
    for path, seed in ((one, 1), (again, 1), (other, 2)):
        write_market(path, kind, seed)
    assert one.read_bytes() == again.read_bytes() != other.read_bytes()
    changes = read_supply_trace(one)
    assert changes[0].at_s == 0 and HORIZON_S / 2 < changes[-1].at_s < HORIZON_S
    prices = [float(line.split(",")[2]) for line in one.read_text().splitlines()[1:]]
    assert LEAST <= min(prices) < max(prices) <= DEMAND


def test_a_short_comparison_names_every_kind(capsys: pytest.CaptureFixture[str]):
    assert main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert all(f"{kind}: " in said for kind in KINDS)
    assert said.count(" of greedy in the mean") == len(KINDS)
