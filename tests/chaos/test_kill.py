"""Pull every plug there is: real processes, real signals. Nothing is lost, nothing comes twice, nobody waits long."""

import asyncio
import random
import signal
import subprocess
import sys

import pytest
from tests.chaos.fleet import Fleet, Tormentor, expected_tokens, play_round, prompt_of

from polyrl.client import Group
from polyrl.engines.emulated import EmulatedConfig
from polyrl.ids import SampleId, group_of
from polyrl.journal.files import EVENTS, LIVE_FOLDER, open_journals, segments
from polyrl.journal.records import resume_scheduler
from polyrl.scheduling.core.commands import OpenRound
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig, SchedulerConfig
from polyrl.scheduling.invariants import check
from polyrl.scheduling.scheduler import Scheduler

ENGINE = ["slots=64", "median_tokens=250", "sigma=0.8", "speedup=1.5", "install_s=0.2"]
SETTINGS = ["journal.segment_mb=0.25"]
"""So small that files are followed by others all the time, also while the manager is killed."""
NUM_PROMPTS = 512
SAMPLES_PER_PROMPT = 8
CONFIG = SchedulerConfig(
    domains=(DomainData(name="all", prompts_per_step=NUM_PROMPTS, num_prompts=100_000),),
    max_new_tokens=2048,
    rounds=RoundsConfig(samples_per_prompt=SAMPLES_PER_PROMPT),
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]


async def kill_the_manager(fleet: Fleet, times: int, rng: random.Random) -> None:
    for _ in range(times):
        await asyncio.sleep(rng.uniform(5.0, 9.0))
        async with fleet.one_plug:
            await fleet.restart_manager(rng.uniform(0.0, 1.0))
    await asyncio.sleep(5.0)
    fleet.manager.send(signal.SIGSTOP)  # stood still for longer than a heartbeat may be missed: nobody is to blame
    await asyncio.sleep(5.0)
    fleet.manager.send(signal.SIGCONT)


async def empty_the_fleet(fleet: Fleet) -> None:
    """All at once, while the manager lives: what neither of two dead ends holds can only be made again."""
    await asyncio.sleep(8.0)
    async with fleet.one_plug:
        for worker in fleet.workers.values():
            await worker.kill()
    await asyncio.sleep(10.0)
    for worker in fleet.workers.values():
        await worker.start()


async def survive(folder, *, seed: int, goes_to_zero: bool) -> tuple[list[Group], dict[str, int], int]:
    async with Fleet(folder, 8, ENGINE, SETTINGS) as fleet:
        tormentor = Tormentor(fleet, seed)
        troubles = [asyncio.create_task(kill_the_manager(fleet, 3, random.Random(seed)))]
        troubles.append(asyncio.create_task(empty_the_fleet(fleet) if goes_to_zero else tormentor.torment()))
        try:
            groups = await play_round(fleet, CONFIG, 0, 300.0)
        finally:
            for task in troubles:
                task.cancel()
            await asyncio.gather(*troubles, return_exceptions=True)
            await tormentor.stop()
        await asyncio.sleep(0.5)
        return groups, tormentor.done, fleet.num_made


def replayed(run_dir) -> Scheduler:
    scheduler = None
    for header, records in open_journals(run_dir):
        scheduler = resume_scheduler(header, scheduler)
        for record in records:
            scheduler.handle(record.event, record.now)
    assert scheduler is not None
    return scheduler


def check_groups(groups: list[Group]) -> int:
    """Every group once, every sample whole and as its seed has it. Returns all their tokens."""
    assert len(groups) == len({group.id for group in groups}) == NUM_PROMPTS
    num_tokens = 0
    for group in groups:
        assert len({sample.id for sample in group.samples}) == SAMPLES_PER_PROMPT
        for sample in group.samples:
            assert group_of(SampleId(sample.id)) == group.id
            assert len(sample.tokens) == len(sample.logprobs)
            assert sample.segments[0].from_token == 0
            assert all(segment.version == 0 for segment in sample.segments)
            num_tokens += len(sample.tokens)
    return num_tokens


@pytest.mark.parametrize("goes_to_zero", [False, True], ids=["a plug a second", "the fleet goes to zero for 10 s"])
def test_a_round_survives(tmp_path, goes_to_zero):
    groups, done, num_made = asyncio.run(survive(tmp_path, seed=7, goes_to_zero=goes_to_zero))
    num_tokens = check_groups(groups)
    check_texts(groups, tmp_path)
    scheduler = replayed(tmp_path / "run")
    check(scheduler, scheduler._now)
    ledger = scheduler.ledger
    assert ledger.tokens_kept == num_tokens
    assert ledger.samples_trained == NUM_PROMPTS * SAMPLES_PER_PROMPT == ledger.samples_started
    regenerated = num_made - ledger.tokens_arrived
    print(f"\n{done}, {ledger.moves}: {num_made} tokens made, {regenerated} again ({regenerated / num_made:.2%})")
    assert len(segments(tmp_path / "run" / LIVE_FOLDER, EVENTS)) > 2
    replay = subprocess.run(
        [sys.executable, "-m", "polyrl", "replay", str(tmp_path / "run")], capture_output=True, check=False
    )
    assert replay.returncode == 0, replay.stderr
    if not goes_to_zero:
        assert sum(done.values()) >= 15
        assert sum(ledger.moves.values()) > 100
    assert 0 <= regenerated < 0.02 * num_made, f"{regenerated / num_made:.2%} were made again"


def check_texts(groups: list[Group], folder) -> None:
    """A sample that moved reads as if it had not."""
    engine = EmulatedConfig(median_tokens=250, sigma=0.8)
    prompts = {}
    scheduler = None
    for header, records in open_journals(folder / "run"):
        scheduler = resume_scheduler(header, scheduler)
        for record in records:
            for command in scheduler.handle(record.event, record.now):
                if isinstance(command, OpenRound):
                    prompts |= {planned.group: planned for planned in command.groups}
    for group in groups[::5]:
        planned = prompts[group.id]
        prompt = prompt_of(planned.domain, planned.prompt, planned.epoch)
        for sample in group.samples:
            assert sample.tokens.tolist() == expected_tokens(sample.id, prompt, CONFIG, engine), sample.name
