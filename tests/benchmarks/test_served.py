"""`make bench NAME=served` on real servers, with a small load: that it measures what it says."""

import json

import pytest
from benchmarks.__main__ import main
from tests.engines.servers import python_of

from polyrl.engines.served.server import ServerKind


@pytest.mark.engines
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_is_measured_straight_and_through_worker_and_manager(
    kind: ServerKind, capsys: pytest.CaptureFixture[str]
):
    python_of(kind)
    assert main(["served", "--quick", "--json", "--server", kind, "--batch", "16", "--new", "32"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["server"], result["batch"], result["new"]) == (kind, 16, 32)
    assert result["tok_s"] > 0
    assert result["tok_s_ratio"] == pytest.approx(result["tok_s"] / result["direct_tok_s"], rel=0.3)
    assert result["tok_s_ratio_to_thrifty"] > 0
    assert 0 < result["install_stood_still_s"] <= result["install_s"]
    assert result["from_disk_stood_still_s"] > 0
    assert result["weights_bytes"] > 1_000_000


def test_a_batch_that_is_no_whole_number_of_groups_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["served", "--batch", "12"]) == 2
    assert "expected a multiple of 8" in capsys.readouterr().err
