"""Ranks on two nodes publish together: the versions are those of rank zero alone, and each node sends its share."""

import json
from pathlib import Path

import pytest
from tests.processes import run_module
from tests.trainer.nodes_at_work import CASES
from tests.trainer.small import save_small

from polyrl.engines.served.process import free_port

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("which", ["first", pytest.param("others", marks=pytest.mark.chaos)])
def test_two_nodes_publish_what_rank_zero_alone_does_and_each_sends_its_share(which: str, tmp_path: Path):
    for family in ("qwen3", "qwen3_moe"):
        save_small(tmp_path / family, family)
    run_module("tests.trainer.nodes_at_work", str(tmp_path), str(free_port()), which)
    for num_replicas, name in CASES[which]:
        for told in json.loads((tmp_path / f"{num_replicas} of {name}.json").read_text()):
            case = (num_replicas, name, told)
            assert told["digests"][0] == told["digests"][1], case
            assert told["same"], case
            assert told["num_addresses"] == 2, case
            assert 0.3 < told["sent"][0] / told["sent"][1] < 0.7, case
