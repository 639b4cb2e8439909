"""Reward workers and a manager on a real port: jobs there and results back, breaks, drains, and workers that lie with a
valid token. Each liar is refused with a reason and named, and the honest one beside it scores what there is."""

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
import requests
from tests.integration.desks import polyrl
from tests.integration.live import PATIENCE_S, QUICK, Live, manager, run, trainer, until
from tests.rewards.sandbox.conftest import bubblewrap

from polyrl.cli.main import main
from polyrl.config.rewards import WeightedReward
from polyrl.errors import UserError
from polyrl.journal.files import find_begun, open_journal
from polyrl.manager.frames_in import reward_joining
from polyrl.manager.http import Front
from polyrl.manager.service import Service
from polyrl.manager.status import status
from polyrl.rewards.groups import AnswerFacts, RewardGroup, make_group
from polyrl.rewards.messages import RewardScored
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.remote import travel
from polyrl.rewards.remote.agent import RewardAgent, RewardWorkerOptions, RewardWorkerOver
from polyrl.rewards.remote.dispatcher import Dispatcher
from polyrl.rewards.remote.travel import RewardTerms, pack_terms
from polyrl.rewards.reward import RewardFailed, RewardInput, RewardTimedOut
from polyrl.scheduling.core import events as e
from polyrl.wire import frames
from polyrl.wire import reward_frames as r
from polyrl.wire.control import RewardJoinReply, RewardJoinRequest
from polyrl.wire.dial import Dialer

__all__ = ["bubblewrap"]  # a fixture
MINE = """
import os, time

def length(given):
    return {"score": len(given.answer), "half": 0.5}

def slow(given):
    time.sleep(float(given.row.get("seconds", 0.3)))
    return 1.0

def raises(given):
    raise KeyError("nothing")

def burns(given):
    while True:
        pass

def dies(given):
    os._exit(3)

def rank(given):
    lengths = [len(one.answer) for one in given.answers]
    return [1.0 if one == max(lengths) else {"score": 0.0, "length": one} for one in lengths]

def many_parts(given):
    names = [f"{n:02d}{'x' * 60}" for n in range(32)]
    return [dict.fromkeys(names, 1.5) for _ in given.answers]

def reads_home(given):
    return float(os.path.exists(os.path.expanduser("~/.profile")) or os.path.exists("/etc/shadow"))

def tells_secret(given):
    return float(os.environ.get("MY_API_KEY", "-1"))
"""


@pytest.fixture(autouse=True)
def _module_of_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "remote_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "remote_mine", raising=False)


def terms(*functions: str, wall_s: float = 20.0, environment: tuple[str, ...] = ()) -> RewardTerms:
    wanted = {f"rewards.functions.{n}": WeightedReward(function=one) for n, one in enumerate(functions)}
    return RewardTerms(functions=wanted, wall_s=wall_s, memory_bytes=0, environment=environment)


def given(answer: str = "abc", limit_s: float = 0.0, **row: object) -> RewardInput:
    return RewardInput("1+2=", answer, "abc", dict(row), "stop", len(answer) + 1, limit_s)


@asynccontextmanager
async def scoring(
    live: Live, wanted: RewardTerms | None = None, processes: int = 0, session: str = ""
) -> AsyncIterator[RewardPool]:
    """A trainer with a run open, and its pool."""
    wanted = terms("remote_mine:length", "remote_mine:slow") if wanted is None else wanted
    async with contextlib.AsyncExitStack() as stack:
        if not session:
            opened = (await stack.enter_async_context(trainer(live))).opened
            assert opened is not None
            session = opened.session
        pool = RewardPool(processes, wanted.wall_s)
        dialer = Dialer(live.url, live.token("admin"))
        task = asyncio.create_task(Dispatcher(pool.remote, dialer, session, pack_terms(wanted), processes).run())
        try:
            yield pool
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await pool.close()


@asynccontextmanager
async def reward_worker(
    live: Live, name: str = "honest", places: int = 2, price: float = 0.0
) -> AsyncIterator[tuple[RewardAgent, "asyncio.Task[RewardWorkerOver]"]]:
    options = RewardWorkerOptions(name, places, drain_deadline_s=0.5, price_usd_per_hour=price)
    agent = RewardAgent(Dialer(live.url, live.token("reward")), options)
    life = asyncio.create_task(agent.run())
    try:
        yield agent, life
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


def is_ready(live: Live, name: str = "honest") -> Callable[[], bool]:
    return lambda: any(one.name == name and one.is_ready for one in live.service.lobby.reward_relay.workers.values())


def test_answers_are_scored_on_reward_workers_which_join_before_or_after_the_trainer(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, reward_worker(live, "early"):
            async with scoring(live) as pool, reward_worker(live, "late", places=300):
                found = await asyncio.gather(*(pool.score("remote_mine:length", given("x" * n)) for n in range(30)))
                assert [one.score for one in found] == list(range(30))
                assert found[0].parts == {"half": 0.5} and found[0].cpu_s is not None
                told = {one.name: one for one in status(live.service.lobby, 1.0).reward_workers}
                assert told["late"].places == 256, "more are not believed"
                assert pool.remote.take_metrics()["reward/remote_scored"] == 30
            await until(lambda: live.service.lobby.reward_relay.dispatcher is None, "the trainer has left")

    run(scenario(), 60.0)


def test_whole_groups_are_scored_on_reward_workers_too(tmp_path: Path):
    function = WeightedReward(function="remote_mine:rank", whole_group=True)
    wanted = msgspec.structs.replace(terms(), functions={"rewards.functions.0": function})

    async def scenario() -> None:
        async with manager(tmp_path) as live, scoring(live, wanted) as pool, reward_worker(live):
            group = make_group(
                given(), [AnswerFacts("a", "stop", 2), AnswerFacts("aaa", "stop", 4), AnswerFacts("aa", "length", 2)]
            )
            found = await pool.score_group("remote_mine:rank", group)
            assert [one and one.score for one in found] == [0.0, 1.0, 0.0]
            assert found[2] is not None and found[2].parts == {"length": 2.0}

    run(scenario(), 60.0)


def test_the_rewards_of_a_large_group_come_back_whole_and_those_of_one_too_large_are_a_failure(tmp_path: Path):
    function = WeightedReward(function="remote_mine:many_parts", whole_group=True)
    wanted = msgspec.structs.replace(terms(), functions={"rewards.functions.0": function})

    def group_of(num: int) -> RewardGroup:
        return make_group(given(), [AnswerFacts("a", "stop", 2)] * num)

    async def scenario() -> None:
        async with manager(tmp_path) as live, scoring(live, wanted) as pool, reward_worker(live):
            found = await pool.score_group("remote_mine:many_parts", group_of(1024))  # 2.4 MB
            assert len(found) == 1024 and all(one is not None and len(one.parts) == 32 for one in found)
            with pytest.raises(
                RewardFailed, match=r"the rewards and their parts are 9,\d+,\d+ bytes; expected at most"
            ):
                await pool.score_group("remote_mine:many_parts", group_of(4000))
            found = await pool.score_group("remote_mine:many_parts", group_of(2))
            assert len(found) == 2 and set(live.service.lobby.reward_relay.workers) == {"honest"}

    run(scenario(), 60.0)


def test_the_ledger_has_a_line_for_each_reward_worker_that_agrees_with_the_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async def scenario() -> float:
        async with manager(tmp_path) as live, scoring(live, terms("remote_mine:length")) as pool:
            async with reward_worker(live, "dear", price=36.0) as (agent, life):
                await asyncio.gather(*(pool.score("remote_mine:length", given("x" * n)) for n in range(12)))
                agent.drain("enough")
                await life
            async with reward_worker(live, "cheap"):
                await until(is_ready(live, "cheap"), "it is ready")
            line = live.service.lobby.need_run().scheduler.ledger.reward_workers["dear"]
            assert (line.num_jobs, line.num_joins, line.num_losses) == (12, 1, 0)
            assert line.cpu_s > 0.05 and line.seconds > 0
            assert line.usd == pytest.approx(line.seconds * 0.01)
            return line.usd

    usd = run(scenario(), 60.0)
    assert main(["ledger", str(tmp_path), "--verify"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "seconds of in all of CPU jobs $/h $ joined lost dear" in shown and " cheap " in shown
    assert "reward workers $" in shown and "verified" in shown
    assert main(["ledger", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["usd"]["reward_workers"] == pytest.approx(usd)
    assert {one["reward_worker"]: one["num_jobs"] for one in told["reward_workers"]} == {"dear": 12, "cheap": 0}


def test_a_process_that_joins_again_and_again_is_in_the_journal_once(tmp_path: Path):
    facts = RewardJoinRequest(name="again", protocol=frames.PROTOCOL, secret="ab" * 16, places=1)

    async def scenario() -> None:
        async with manager(tmp_path) as live, scoring(live):
            for _ in range(50):
                reward_joining.join(live.service.lobby, facts)

    run(scenario(), 60.0)
    _, records = open_journal(find_begun(tmp_path)[-1])
    assert sum(isinstance(record.event, e.RewardWorkerJoined) for record in records) == 1


@pytest.mark.usefixtures("bubblewrap")
def test_functions_run_behind_walls_on_the_reward_worker_where_the_recipe_wants_them(tmp_path: Path):
    (tmp_path / "run").mkdir()
    wanted = msgspec.structs.replace(terms("remote_mine:reads_home"), sandbox=True)

    async def scenario() -> None:
        async with manager(tmp_path / "run") as live, scoring(live, wanted) as pool, reward_worker(live):
            assert (await pool.score("remote_mine:reads_home", given())).score == 0.0

    run(scenario(), 60.0)


def test_local_processes_are_preferred_and_reward_workers_take_what_is_more(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, scoring(live, processes=1) as pool, reward_worker(live, places=4):
            await until(is_ready(live), "the reward worker is ready")
            await pool.score("remote_mine:length", given())
            assert pool.remote.take_metrics()["reward/remote_scored"] == 0
            await asyncio.gather(*(pool.score("remote_mine:slow", given()) for _ in range(5)))
            assert pool.remote.take_metrics()["reward/remote_scored"] == 4
            assert len(pool.pids) == 1

    run(scenario(), 60.0)


def test_limits_failures_and_crashes_are_told_as_if_the_function_ran_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_API_KEY", "42")
    names = ("raises", "burns", "dies", "tells_secret", "slow")
    wanted = terms(*(f"remote_mine:{one}" for one in names), wall_s=2.0, environment=("MY_API_KEY",))

    async def scenario() -> None:
        async with manager(tmp_path) as live, scoring(live, wanted) as pool, reward_worker(live):
            with pytest.raises(RewardFailed, match=r"KeyError: 'nothing' .*remote_mine.py:12, in raises"):
                await pool.score("remote_mine:raises", given())
            with pytest.raises(RewardTimedOut, match=r"took longer than 0.2 s of CPU time") as timed_out:
                await pool.score("remote_mine:burns", given(limit_s=0.2))
            assert timed_out.value.cpu_s == 0.2
            with pytest.raises(RewardTimedOut, match="took longer than 2 s"):
                await pool.score("remote_mine:slow", given(seconds=60))
            with pytest.raises(RewardFailed, match="its process ended: exit code 3"):
                await pool.score("remote_mine:dies", given())
            assert (await pool.score("remote_mine:tells_secret", given())).score == 42.0

    run(scenario(), 60.0)


def test_a_worker_that_lacks_a_function_leaves_with_one_line_that_the_status_has_too(tmp_path: Path):
    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            scoring(live, terms("not_here_at_all:score")),
            reward_worker(live, "poor") as (_, life),
        ):
            over = await asyncio.wait_for(life, PATIENCE_S)
            assert over.is_misfit and not over.ok
            assert str(over) == (
                'cannot score this run here: rewards.functions.0: "not_here_at_all:score": not_here_at_all cannot be '
                "imported: ModuleNotFoundError: No module named 'not_here_at_all'"
            )
            ((name, (why, _)),) = live.service.lobby.turned_away.items()
            assert name == "poor" and why.startswith("cannot score this run here: rewards.functions.0")

    run(scenario(), 60.0)


def test_a_worker_without_bubblewrap_is_no_place_for_programs_that_a_model_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))

    async def scenario() -> None:
        wanted = terms("code")
        async with manager(tmp_path) as live, scoring(live, wanted), reward_worker(live) as (_, life):
            over = await asyncio.wait_for(life, PATIENCE_S)
            assert over.is_misfit and "cannot score this run here" in str(over) and "bubblewrap" in str(over)

    run(scenario(), 60.0)


@pytest.mark.usefixtures("bubblewrap")
def test_programs_run_in_the_sandbox_of_the_reward_worker(tmp_path: Path):
    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            scoring(live, terms("code")) as pool,
            reward_worker(live, places=2),
        ):
            cases = [{"input": "2 3", "output": "5"}]
            right = "```python\nprint(sum(map(int, input().split())))\n```"
            found = [
                await pool.score("code", given(one, tests=cases), {"cpu_s": 0.5, "sandboxes": 1})
                for one in (right, "```python\nprint(4)\n```", "```python\nwhile True: pass\n```")
            ]
            assert [one.score for one in found] == [1.0, 0.0, 0.0]
            assert [one.outcome for one in found] == ["scored", "scored", "timed_out"]

    run(scenario(), 90.0)


def test_a_drained_worker_finishes_what_it_can_hands_the_rest_back_and_leaves(tmp_path: Path):
    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            scoring(live) as pool,
            reward_worker(live, "leaves", places=4) as (agent, life),
        ):
            tasks = [
                asyncio.create_task(pool.score("remote_mine:slow", given(seconds=s))) for s in (0.1, 0.1, 1.5, 1.5)
            ]
            await until(lambda: len(agent._jobs) == 4, "it scores them")
            async with reward_worker(live, "stays", places=4):
                await until(is_ready(live, "stays"), "another one is there")
                body = {"reason": "the machine is needed"}
                url = f"{live.url}/v1/reward-workers/leaves/drain"
                asked = await asyncio.to_thread(
                    requests.post, url, json=body, headers=live.headers("admin"), timeout=PATIENCE_S
                )
                assert asked.json() == {"draining": "leaves"}
                over = await asyncio.wait_for(life, PATIENCE_S)
                assert over.ok and str(over) == "the machine is needed"
                assert [one.score for one in await asyncio.gather(*tasks)] == [1.0] * 4
                assert pool.remote.take_metrics()["reward/remote_lost"] == 0

    run(scenario(), 60.0)


def test_the_manager_is_started_again_and_jobs_that_were_under_way_are_scored_once(tmp_path: Path):
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(manager_at(tmp_path, 0))
            port, live = first[1], first[0]
            fleet = await stack.enter_async_context(trainer(live))
            assert fleet.opened is not None
            pool = await stack.enter_async_context(scoring(live, session=fleet.opened.session))
            agent, life = await stack.enter_async_context(reward_worker(live, places=4))
            tasks = [asyncio.create_task(pool.score("remote_mine:slow", given(seconds=1.0))) for _ in range(3)]
            await until(lambda: len(agent._jobs) == 3, "it scores them")
            await first[2]()
            await asyncio.sleep(0.2)
            again = await stack.enter_async_context(manager_at(tmp_path, port))
            assert [one.score for one in await asyncio.gather(*tasks)] == [1.0] * 3
            assert agent._num_scored == 3, "nothing was scored twice"
            assert not life.done() and is_ready(again[0])()
            assert pool.remote.take_metrics()["reward/remote_lost"] == 0

    run(scenario(), 60.0)


@asynccontextmanager
async def manager_at(run_dir: Path, port: int) -> AsyncIterator[tuple[Live, int, Callable[[], "asyncio.Future[None]"]]]:
    """A manager on this port; the last of the three stops it before the block ends."""
    service = Service(run_dir, QUICK)
    front = Front(service)
    address = await front.listen("127.0.0.1", port, None)
    owner = asyncio.create_task(service.own())
    is_stopped = False

    async def stop() -> None:
        nonlocal is_stopped
        if not is_stopped:
            is_stopped = True
            owner.cancel()
            await front.close("the manager stops")
            service.close()

    try:
        yield Live(service, address), address.port, stop  # type: ignore[misc]
    finally:
        await stop()


def test_a_worker_that_is_given_up_joins_again_and_its_late_result_is_held_against_nobody(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, scoring(live) as pool, reward_worker(live, places=4) as (agent, life):
            task = asyncio.create_task(pool.score("remote_mine:slow", given(seconds=1.0)))
            await until(lambda: len(agent._jobs) == 1, "it scores it")
            (session,) = live.service.lobby.reward_relay.workers.values()
            await live.service.call(lambda lobby: reward_joining.forget(lobby, session, "no heartbeat", rejoin=True))
            assert (await task).score == 1.0
            await until(lambda: agent._num_scored == 2, "it has scored it twice, which nobody could know")
            assert not life.done() and is_ready(live)() and not live.refused.get("result")

    run(scenario(), 60.0)


def test_a_new_trainer_gets_the_workers_and_former_jobs_are_dropped(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, reward_worker(live, places=1) as (agent, _):
            async with scoring(live) as former:
                task = asyncio.create_task(former.score("remote_mine:slow", given(seconds=600)))
                await until(lambda: len(agent._jobs) == 1, "it scores for the former trainer")
            task.cancel()
            async with scoring(live) as pool:
                assert (await pool.score("remote_mine:length", given("four"))).score == 4.0
                assert not agent._jobs

    run(scenario(), 60.0)


def test_the_command_leaves_in_one_line_with_the_token_of_another_or_without_a_function(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, scoring(live, terms("not_here_at_all:score")):
            said = []
            for token in ("worker.token", "reward.token"):
                joining = ("--join", live.url, "--token-file", str(tmp_path / token), "--name", "poor", "--quiet")
                process = polyrl("worker", "--rewards", *joining)
                _, errors = await asyncio.to_thread(process.communicate, timeout=60)
                assert process.returncode == 2, errors
                said += errors.splitlines()
            assert said == [
                f"polyrl: error: reward worker poor: {live.url}: the worker token may not do this; "
                "the reward token may",
                "polyrl: error: reward worker poor: cannot score this run here: rewards.functions.0: "
                '"not_here_at_all:score": not_here_at_all cannot be imported: ModuleNotFoundError: No module named '
                "'not_here_at_all'",
            ]

    run(scenario(), 90.0)


# Liars


class Liar:
    """A connection with a reward worker's session, on which a test says whatever it wants."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self.jobs: list[r.GiveJob] = []
        self.rules: r.RewardRules | None = None
        self.release: frames.Release | None = None

    async def say(self, *said: msgspec.Struct | bytes) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            for one in said:
                await self._socket.send_bytes(one if isinstance(one, bytes) else frames.encode(one))

    async def listen(self) -> None:
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                return
            match r.decode_to_reward_worker(message.data):
                case r.GiveJob() as job:
                    self.jobs.append(job)
                case r.RewardRules() as rules:
                    self.rules = rules
                case frames.Release() as release:
                    self.release = release


@asynccontextmanager
async def liar(
    live: Live, places: int = 4, name: str = "liar", *, secret: str = "0" * 32, greets: bool = True
) -> AsyncIterator[Liar]:
    async with Dialer(live.url, live.token("reward")) as dialer:
        request = RewardJoinRequest(name=name, protocol=frames.PROTOCOL, secret=secret, places=places)
        joined = await dialer.post("/v1/reward-workers/join", request, RewardJoinReply)
        socket = await dialer.stream("/v1/reward-worker", joined.session, r.MAX_DISPATCHER_FRAME_BYTES)
        peer = Liar(socket)
        listening = asyncio.create_task(peer.listen())
        try:
            if greets:
                await peer.say(r.RewardHello())
                await until(lambda: peer.rules is not None, "it has the rules")
                assert peer.rules is not None
                await peer.say(r.RewardReady(peer.rules.era, places))
            yield peer
        finally:
            listening.cancel()
            await socket.close()


def raw(tag: str, *fields: object) -> bytes:
    return msgspec.msgpack.encode([tag, *fields])


Lie = Callable[[r.GiveJob], msgspec.Struct | bytes | list[bytes]]
LIES: dict[str, tuple[Lie, str]] = {
    "a score that is NaN": (
        lambda job: r.JobDone(job.job, travel.pack_reply(RewardScored(b"", math.nan, {}))),
        "result",
    ),
    "a result that is none": (lambda job: r.JobDone(job.job, b"\xc1"), "result"),
    "a result that nests without end": (
        lambda job: r.JobDone(job.job, b"\x98" + travel.pack_reply(RewardScored(b"", 1.0, {}))[1:] + b"\x91" * 60_000),
        "result",
    ),
    "a CPU time that is NaN": (
        lambda job: r.JobDone(job.job, msgspec.msgpack.encode(["_TravellingFailure", "slow", "timed_out", math.nan])),
        "result",
    ),
    "a text that is none": (lambda job: b"\x92\xa7leaving\xa1\xff", "frame"),
    "a result for a job that it was not given": (lambda job: r.JobDone(job.job + 1, b""), "result"),
    "a return of a job that it was not given": (lambda job: r.JobsReturned((job.job + 7,)), "result"),
    "a job number below zero": (lambda job: raw("job_done", -1, b""), "frame"),
    "a job number beyond all": (lambda job: raw("job_done", 1 << 63, b""), "frame"),
    "a result of ten megabytes": (lambda job: raw("job_done", job.job, b"x" * (10 << 20)), "frame"),
    "a return of a million jobs": (lambda job: raw("jobs_returned", [1] * 10_000), "frame"),
    "a second hello": (lambda job: r.RewardHello(), "order"),
    "more than a frame has": (lambda job: raw("job_done", job.job, b"", "more"), "frame"),
    "an unknown frame": (lambda job: raw("explode"), "frame"),
    "a frame of another peer": (lambda job: raw("send_job", "honest", "life", 1, b""), "frame"),
    "a flood": (lambda job: [frames.encode(r.RewardReport(0, 0, 0))] * 2000, "flood"),
    "a flood of results": (lambda job: [frames.encode(r.JobDone(5, b""))] * 2000, "flood"),
    "large results that nobody wants": (lambda job: [frames.encode(r.JobDone(5, bytes(7 << 20)))] * 8, "flood"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_worker_that_says_what_cannot_be_true_is_refused_and_its_answers_are_scored_elsewhere(
    tmp_path: Path, lie: str
):
    make, kind = LIES[lie]

    async def scenario() -> None:
        async with manager(tmp_path) as live, scoring(live) as pool, liar(live) as peer:
            task = asyncio.create_task(pool.score("remote_mine:length", given("four")))
            await until(lambda: bool(peer.jobs), "the liar has the answer")
            said = make(peer.jobs[0])
            await peer.say(*(said if isinstance(said, list) else [said]))
            await until(lambda: live.refused.get(kind, 0) >= 1, f"it is refused for {kind}: {live.refused}")
            async with reward_worker(live):
                assert (await task).score == 4.0
            if lie != "a result of ten megabytes":  # such a frame is not read: its connection is cut
                assert "liar" in live.service.lobby.turned_away
                await until(lambda: peer.release is not None and peer.release.in_anger, "it was told so")
                with pytest.raises(UserError, match="reward worker 'another' was sent away: "):
                    async with liar(live, name="another"):  # the same process, as its secret tells
                        pass

    run(scenario(), 60.0)


def test_frames_before_the_hello_and_silence_end_a_session(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, scoring(live):
            async with liar(live, greets=False) as peer:
                await peer.say(r.RewardReady(1, 1))
                await until(lambda: live.refused.get("order") == 1, "it is refused")
            async with liar(live, name="silent", secret="2" * 32):
                await until(lambda: "silent" not in live.service.lobby.reward_relay.workers, "it is missed")

    run(scenario(), 60.0)


def test_nobody_takes_the_name_of_a_worker_that_is_there(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, scoring(live), reward_worker(live, "mine"):
            await until(is_ready(live, "mine"), "it is ready")
            body = RewardJoinRequest(name="mine", protocol=frames.PROTOCOL, secret="1" * 32, places=1)
            url = f"{live.url}/v1/reward-workers/join"
            data, headers = msgspec.json.encode(body), live.headers("reward")
            found = await asyncio.to_thread(requests.post, url, data=data, headers=headers, timeout=PATIENCE_S)
            assert found.status_code == 423 and "take another --name" in found.json()["error"]
            assert is_ready(live, "mine")()

    run(scenario(), 60.0)


def test_a_token_opens_what_it_is_for_and_nothing_else(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live):
            join = RewardJoinRequest(name="w", protocol=frames.PROTOCOL, secret="1" * 32, places=1)
            body = msgspec.json.encode(join)

            def ask(method: str, path: str, scope: str, data: bytes | None = None) -> int:
                url = f"{live.url}{path}"
                return requests.request(
                    method, url, data=data, headers=live.headers(scope), timeout=PATIENCE_S
                ).status_code

            for scope in ("worker", "host", "generate"):
                assert await asyncio.to_thread(ask, "POST", "/v1/reward-workers/join", scope, body) == 403, scope
                assert await asyncio.to_thread(ask, "GET", "/v1/reward-worker", scope) == 403, scope
                assert await asyncio.to_thread(ask, "GET", "/v1/rewards", scope) == 403, scope
            for method, path in (
                ("POST", "/v1/join"), ("GET", "/v1/worker"), ("POST", "/v1/hosts/join"), ("GET", "/v1/host"),
                ("POST", "/v1/run"), ("GET", "/v1/trainer"), ("GET", "/v1/rewards"), ("GET", "/v1/status"),
                ("POST", "/v1/reward-workers/w/drain"), ("POST", "/v1/workers/w/drain"), ("POST", "/v1/completions"),
            ):  # fmt: skip
                assert await asyncio.to_thread(ask, method, path, "reward") == 403, path
            assert await asyncio.to_thread(ask, "POST", "/v1/reward-workers/join", "reward", body) == 200
            assert await asyncio.to_thread(ask, "POST", "/v1/reward-workers/x/drain", "admin") == 404

    run(scenario(), 60.0)


def test_the_dispatcher_wants_the_trainers_session_and_its_words_are_bounded(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet, Dialer(live.url, live.token("admin")) as dialer:
            url, headers = f"{live.url}/v1/rewards", {**live.headers("admin"), "X-PolyRL-Session": "0" * 32}
            found = await asyncio.to_thread(requests.get, url, headers=headers, timeout=PATIENCE_S)
            assert found.status_code == 410 and json.loads(found.content)["error"]
            assert fleet.opened is not None
            socket = await dialer.stream("/v1/rewards", fleet.opened.session, 1 << 20)
            await socket.send_bytes(frames.encode(r.SendJob("w", "life", 1, b"")))
            answer = r.decode_to_dispatcher((await socket.receive()).data)
            assert isinstance(answer, frames.Release) and "a SendJob of a connection" in answer.why

    run(scenario(), 60.0)
