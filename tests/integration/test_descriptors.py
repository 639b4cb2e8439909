"""Whoever can reach the port cannot take the manager's descriptors: strangers make way, and the journal has its own."""

import asyncio
import contextlib
import signal
import socket
import sys
from pathlib import Path

from tests.chaos.fleet import Fleet, Process
from tests.integration.live import CONFIG, play_round, prompt_of, run

from polyrl.client import connect

_LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {1}))
os.execv(sys.argv[1], sys.argv[1:])
"""
ENGINE = ["slots=4", "tokens_per_s=400", "median_tokens=30"]


class Limited(Fleet):
    """A fleet whose manager has few descriptors."""

    def __init__(self, folder: Path, soft: int, hard: int, settings: list[str]) -> None:
        super().__init__(folder, 1, ENGINE, settings)
        limited = [sys.executable, "-c", _LIMITED.format(soft, hard)]
        self.manager = Process([*limited, *self.manager._argv], folder / "manager.log")


def dial(port: int, num: int) -> list[socket.socket]:
    """So many connections without a word. Some may be refused or cut: that is up to the other side."""
    held: list[socket.socket] = []
    for _ in range(num):
        one = socket.socket()
        one.settimeout(2.0)
        with contextlib.suppress(OSError):
            one.connect(("127.0.0.1", port))
        held.append(one)
    return held


async def besieged(folder: Path, soft: int, hard: int, num: int, num_rounds: int) -> str:
    """Rounds of a fleet whose manager is dialled by `num` strangers all the while. What the manager said."""
    settings = ["journal.segment_mb=0.003", "limits.request_timeout_s=60"]
    strangers: list[socket.socket] = []
    async with Limited(folder, soft, hard, settings) as fleet:
        token = (fleet.run_dir / "admin.token").read_text().strip()
        async with connect(f"http://127.0.0.1:{fleet.port}", token, CONFIG, prompts=prompt_of) as trainer:
            try:
                for step in range(num_rounds):
                    strangers += await asyncio.to_thread(dial, fleet.port, num // num_rounds)
                    await trainer.publish(step)
                    groups = await play_round(trainer, step)
                    assert len(groups) == CONFIG.domains[0].prompts_per_step
                status = await trainer.status()
                assert status.refused.get("connections", 0) > 0
            finally:
                for one in strangers:
                    one.close()
        assert len(list((fleet.run_dir / "journal").glob("events-*.bin"))) > 1
        fleet.manager.send(signal.SIGTERM)
        assert await fleet.manager.wait(20.0) == 0
    return (folder / "manager.log").read_text()


def test_strangers_cannot_take_the_descriptors_that_a_journal_needs(tmp_path):
    said = run(besieged(tmp_path, 160, 160, 400, 4), timeout_s=110.0)
    assert "Traceback" not in said
    assert "Too many open files" not in said


def test_the_soft_limit_is_raised_to_the_hard_one(tmp_path):
    said = run(besieged(tmp_path, 80, 2048, 400, 2), timeout_s=110.0)
    assert "Traceback" not in said
