"""The machines of a trainer, as the command line names them: mistakes are one line, at once."""

import os

import pytest

from polyrl.cli.main import main
from polyrl.errors import UserError
from polyrl.run import nodes
from polyrl.run.nodes import Nodes
from polyrl.trainer.ranks import RankInfo


@pytest.mark.parametrize(
    "meet",
    ["", "host", ":29500", "host:", "host:0", "host:65536", "host:99999", "host:1x", "host:²", "host:" + "9" * 5000],
)
def test_a_place_to_meet_that_is_none_is_one_line(meet: str):
    with pytest.raises(UserError, match=r"^--meet: .*expected HOST:PORT") as caught:
        nodes.of_options(2, 0, meet, {})
    assert "\n" not in str(caught.value)


def test_a_machine_has_the_number_that_is_said_or_that_slurm_gives_it():
    assert nodes.of_options(2, 1, "h:1", {"SLURM_NODEID": "0"}) == Nodes(2, "h:1", 1)
    assert nodes.of_options(2, None, "[::1]:65535", {"SLURM_NODEID": "1"}) == Nodes(2, "[::1]:65535", 1)
    assert nodes.of_options(2, None, "h:1", {"SLURM_NODEID": "x"}) == Nodes(2, "h:1", 0)
    assert nodes.of_options(1, None, "h:1", {}) is None


def test_nodes_of_ours_within_torchrun_are_refused():
    with pytest.raises(UserError, match=r"--nodes: torchrun has started the ranks"):
        nodes.of_options(2, 0, "h:1", {"TORCHELASTIC_RUN_ID": "none"})


def test_several_machines_without_ranks_for_them_are_refused(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    settings = ("model.path=nowhere", "--run-dir", str(tmp_path / "run"))
    assert main(["train", "arithmetic", *settings, "--nodes", "2", "--meet", "127.0.0.1:29500"]) == 2
    assert capsys.readouterr().err == (
        "polyrl: error: train.ranks: 1 ranks on 2 nodes; expected a multiple of 2 (--nodes)\n"
    )


def test_node_zero_says_at_once_that_its_own_name_is_not_known():
    info = RankInfo(0, 2, "tcp://no-such-host.invalid:29500", num_nodes=2)
    with pytest.raises(UserError, match=r"--meet no-such-host.invalid: is not known here"):
        nodes.announce(info)
