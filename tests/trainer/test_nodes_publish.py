"""Ranks on two nodes publish together: the versions are those of rank zero alone, and each node sends its share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.trainer.nodes_at_work import CASES, NUM_RANKS
from tests.trainer.small import save_small

from polyrl.engines.served.process import free_port

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]


def test_two_nodes_publish_what_rank_zero_alone_does_and_each_sends_its_share(tmp_path: Path):
    for family in ("qwen3", "qwen3_moe"):
        save_small(tmp_path / family, family)
    command = [sys.executable, "-m", "tests.trainer.nodes_at_work"]
    given = [str(tmp_path), str(free_port())]
    started = [subprocess.Popen([*command, str(rank), *given], cwd=ROOT) for rank in range(NUM_RANKS)]
    try:
        assert [one.wait(timeout=300) for one in started] == [0] * NUM_RANKS
    finally:
        for one in started:
            one.kill()
    for num_replicas, name in CASES:
        for told in json.loads((tmp_path / f"{num_replicas} of {name}.json").read_text()):
            case = (num_replicas, name, told)
            assert told["digests"][0] == told["digests"][1], case
            assert told["same"], case
            assert told["num_addresses"] == 2, case
            assert 0.3 < told["sent"][0] / told["sent"][1] < 0.7, case
