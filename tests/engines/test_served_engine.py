"""The engine over a server of its own, on a stand-in of vLLM: the contract, and what happens when the server dies.

test_servers.py holds the real servers to the same contract.
"""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.engines import standins
from tests.engines.killing import Scenario
from tests.engines.standin.vllm.entrypoints.cli.main import next_token
from tests.integration.live import run

from polyrl.engines.check import check
from polyrl.engines.contract import ON, EngineContract, RecordingSink, Stage
from polyrl.engines.engine import Engine, EngineError, Job, Weights
from polyrl.engines.served import process
from polyrl.engines.served.between import KEY_VARIABLE
from polyrl.engines.served.engine import ServedEngine
from polyrl.engines.served.http import Http, ServerAnswered
from polyrl.engines.served.server import LabelSpan, LaunchCommand, ServedConfig, ServerBroken, ServerLoad
from polyrl.ids import LeaseId, SampleId, Version
from polyrl.wire.frames import Sampling

PROMPT = EngineContract.prompt
VOCAB = standins.MODEL["vocab_size"]


def answer(tokens: list[int], num: int) -> list[int]:
    made: list[int] = []
    while len(made) < num:
        made.append(next_token([*tokens, *made], VOCAB))
    return made


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    port = process.free_port()
    module = ("-m", "vllm.entrypoints.cli.main", "serve", str(standins.save_model(folder / "model")))
    server = subprocess.Popen(
        [standins.python(folder), *module, "--port", str(port)], stdout=subprocess.PIPE, process_group=0
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"it listens\n"
    yield f"http://127.0.0.1:{port}"
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


class TestServedEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _server(self, url: str, tmp_path: Path):
        self.url, self.model = url, standins.save_model(tmp_path / "model")

    def engine(self) -> Engine:
        return ServedEngine("vllm", ServedConfig(model=str(self.model), url=self.url))

    def test_after_an_install_tokens_carry_the_new_version_and_running_samples_fare_as_declared(self):
        pytest.skip("the stand-in takes no weights; real servers do, in test_weights.py")


def play(script, folder: Path, *flags: str, **settings) -> None:
    contract = EngineContract()
    contract.play(script, standins.engine(folder, *flags, **settings))


# Jobs


TRUNCATED = (Sampling(top_p=0.9), Sampling(top_k=5), Sampling(min_p=0.1))


def test_a_server_that_reports_log_probabilities_after_truncation_is_given_no_truncated_sample(tmp_path):
    async def script(stage: Stage) -> None:
        for one in TRUNCATED:
            lease = stage.begin(sampling=one)
            assert await stage.sink.end_of(lease) == "refused"
            assert stage.sink.ends[lease][1].startswith("top-p, top-k and min-p: this server reports log-probabilities")
        assert len(await stage.text()) == 16

    play(script, tmp_path, "--older-extension")


def test_a_server_with_our_extension_is_given_truncated_samples(tmp_path):
    async def script(stage: Stage) -> None:
        for one in TRUNCATED:
            assert len(await stage.text(sampling=one)) == 16

    play(script, tmp_path)


def test_a_server_that_verifies_drafts_is_given_no_truncated_sample(tmp_path):
    """What it accepts does not pass through the sampler that our extension sees."""

    async def script(stage: Stage) -> None:
        lease = stage.begin(sampling=TRUNCATED[0])
        assert await stage.sink.end_of(lease) == "refused"
        assert stage.sink.ends[lease][1].endswith("and without speculation")
        assert len(await stage.text()) == 16

    play(script, tmp_path, "--speculative-config", '{"method": "ngram"}')


def test_what_would_harm_a_server_never_reaches_it(tmp_path):
    async def script(stage: Stage) -> None:
        leases = [stage.begin(prompt=[5, VOCAB]), stage.begin(so_far=[VOCAB]), stage.begin(prompt=[5] * 4096)]
        for lease in leases:
            assert await stage.sink.end_of(lease) == "refused"
        assert len(await stage.text()) == 16
        assert stage.engine.stats().num_outages == 0

    play(script, tmp_path)


def test_an_answer_ends_where_the_context_does(tmp_path):
    async def script(stage: Stage) -> None:
        text = await stage.text(prompt=[5] * 90, max_tokens=1000, sampling=ON)
        assert len(text) == 10

    play(script, tmp_path, max_context=100)


def test_a_resumed_answer_goes_on_and_one_whose_end_was_not_heard_of_ends_at_once(tmp_path):
    async def script(stage: Stage) -> None:
        whole = answer(PROMPT, 12)
        assert await stage.text(so_far=whole[:5], max_tokens=12, sampling=ON) == whole[5:]
        ended = Sampling(ignore_eos=True, stop_ids=(whole[4],))
        lease = stage.begin(so_far=whole[:5], max_tokens=12, sampling=ended)
        assert await stage.sink.end_of(lease) == "stop"
        assert lease not in stage.sink.texts
        assert await stage.text(so_far=whole[:3], max_tokens=12, sampling=ended) == whole[3:5]

    play(script, tmp_path)


def test_more_samples_than_slots_wait_in_the_server_and_are_told_as_waiting(tmp_path):
    async def script(stage: Stage) -> None:
        leases = [stage.begin(max_tokens=200, sampling=ON) for _ in range(5)]
        await stage.sink.some_of(leases[0])
        stats = stage.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.slots) == (2, 3, 2)
        for lease in leases:
            await stage.engine.abort(lease)
        assert stage.engine.stats()[:2] == (0, 0)

    play(script, tmp_path, slots=2)


def test_stamps_that_the_server_contradicts_are_counted(tmp_path):
    async def script(stage: Stage) -> None:
        one = stage.engine
        assert isinstance(one, ServedEngine)
        await stage.text()
        assert one.num_misstamped == 0
        lease = stage.begin(max_tokens=50, sampling=ON)
        await stage.sink.some_of(lease)
        held = one._answers[lease]
        one._compare(held, [LabelSpan("default", 0, 10), LabelSpan("7", 10, 50)])
        one._compare(held, [LabelSpan("default", 0, 10), LabelSpan("default", 10, 50)])
        assert one.num_misstamped == 1

    play(script, tmp_path)


def test_a_version_that_nobody_can_give_is_not_installed(tmp_path):
    async def script(stage: Stage) -> None:
        await stage.engine.install(Weights(Version(0)))
        with pytest.raises(EngineError, match="version 3 has no known source"):
            await stage.engine.install(Weights(Version(3)))

    play(script, tmp_path)


def test_aborts_that_nobody_waits_for_reach_the_server_and_leave_nothing_behind(tmp_path):
    async def script(stage: Stage) -> None:
        assert isinstance(stage.engine, ServedEngine)
        assert stage.engine.server is not None
        leases = [stage.begin(max_tokens=4000, sampling=ON) for _ in range(4)]
        await stage.sink.some_of(leases[-1])
        aborts = asyncio.gather(*map(stage.engine.abort, leases))
        await asyncio.sleep(0)
        aborts.cancel()
        await asyncio.wait([aborts])
        assert stage.engine.stats().num_running == 4
        while stage.engine.stats().num_running:
            await asyncio.sleep(0.01)
        assert (await stage.engine.server.load()).num_running == 0

    play(script, tmp_path)


def test_closing_ends_what_is_being_aborted(tmp_path):
    async def script(stage: Stage) -> None:
        assert isinstance(stage.engine, ServedEngine)
        lease = stage.begin(max_tokens=4000, sampling=ON)
        await stage.sink.some_of(lease)
        task = stage.engine._answers[lease].task
        assert task is not None
        abort = asyncio.create_task(stage.engine.abort(lease))
        await asyncio.sleep(0)
        await stage.engine.close()
        assert task.done()
        await abort

    play(script, tmp_path)


def test_an_abort_is_over_at_once_while_the_server_stands_still(tmp_path):
    async def script(stage: Stage) -> None:
        one = give_way(stage.engine)
        assert one.server is not None
        leases = [stage.begin(max_tokens=4000, sampling=ON) for _ in range(10)]
        await stage.sink.some_of(leases[0])
        await one.server.loading.pause()
        async with asyncio.timeout(4.0):  # without an answer it asks again for 5 s
            await asyncio.gather(*map(one.abort, leases))
        await one.server.loading.resume()
        assert await stage.text()

    play(script, tmp_path)


# Weights


class Scripted:
    """A way to take weights that does as it is told: nothing changes but the server's label."""

    def __init__(
        self,
        http: Http,
        *,
        put: Exception | None = None,
        resume: Exception | None = None,
        stage_s: float = 0.0,
        put_s: float = 0.0,
    ) -> None:
        self._http = http
        self._put, self._resume = put, resume
        self._stage_s, self._put_s = stage_s, put_s
        self.num_pauses = 0

    def flags(self) -> list[str]:
        return []

    def environment(self) -> dict[str, str]:
        return {}

    async def stage(self, weights: Weights) -> Version:
        await asyncio.sleep(self._stage_s)
        return weights.version

    async def pause(self) -> None:
        self.num_pauses += 1
        await self._http.post("/pause", timeout_s=5.0)

    async def put(self, staged: Version) -> None:
        await asyncio.sleep(self._put_s)
        if self._put is not None:
            raise self._put
        await self._http.post("/update_weight_version", {"new_version": str(staged)}, timeout_s=5.0)

    async def resume(self) -> None:
        if self._resume is not None:
            raise self._resume
        await self._http.post("/resume", timeout_s=5.0)

    async def is_paused(self) -> bool:
        return (await self._http.get("/is_paused", timeout_s=5.0))["is_paused"]


def give_way(one: Engine, **trouble: Any) -> ServedEngine:
    assert isinstance(one, ServedEngine)
    server = one._keeper.server
    assert server is not None
    server.loading = Scripted(server.http, **trouble)
    return one


def test_stamps_are_right_to_the_token_over_many_installs_and_the_server_agrees(tmp_path):
    async def script(stage: Stage) -> None:
        one = give_way(stage.engine)
        leases = [stage.begin(max_tokens=300, sampling=ON) for _ in range(8)]
        await stage.sink.some_of(leases[-1])
        for version in range(1, 6):
            await one.install(Weights(Version(version), folder="anywhere"))
        for lease in leases:
            assert await stage.sink.end_of(lease) == "length"
            assert stage.sink.versions[lease][-1] == 5
            assert stage.sink.texts[lease] == answer(PROMPT, 300)
        assert one.num_misstamped == 0

    play(script, tmp_path)


def test_weights_that_a_server_refuses_change_nothing(tmp_path):
    async def script(stage: Stage) -> None:
        one = give_way(stage.engine, put=EngineError("not of this model"))
        lease = stage.begin(max_tokens=200, sampling=ON)
        await stage.sink.some_of(lease)
        with pytest.raises(EngineError, match="not of this model"):
            await one.install(Weights(Version(1), folder="anywhere"))
        assert await stage.sink.end_of(lease) == "length"
        assert set(stage.sink.versions[lease]) == {0}
        assert one.stats().num_outages == 0

    play(script, tmp_path)


@pytest.mark.parametrize(
    "trouble",
    [{"put": ServerBroken("half of it is there")}, {"resume": EngineError("no answer")}],
    ids=["put", "resume"],
)
def test_a_server_that_breaks_over_an_install_writes_no_more_and_is_started_again(trouble, tmp_path):
    async def script(stage: Stage) -> None:
        one = give_way(stage.engine, **trouble)
        lease = stage.begin(max_tokens=4000, sampling=ON)
        await stage.sink.some_of(lease)
        with pytest.raises(ServerBroken):
            await one.install(Weights(Version(1), folder="anywhere"))
        num = len(stage.sink.texts[lease])
        assert await stage.sink.end_of(lease) == "engine_failed"
        assert len(stage.sink.texts[lease]) == num
        await until_up(one)
        text = stage.begin()
        await stage.sink.end_of(text)
        assert set(stage.sink.versions[text]) == {0}

    play(script, tmp_path)


# The server dies


async def until_up(one: Engine) -> None:
    while one.stats().down:
        await asyncio.sleep(0.01)


def test_a_server_that_is_killed_is_started_again_and_what_ran_ends_after_it_is_said_to_be_down(tmp_path):
    async def script(stage: Stage) -> None:
        one = stage.engine
        assert isinstance(one, ServedEngine)
        for death in range(1, 3):
            leases = [stage.begin(max_tokens=4000, sampling=ON) for _ in range(8)]
            for lease in leases:
                await stage.sink.some_of(lease)
            assert one.pid is not None
            os.kill(one.pid, signal.SIGKILL)
            assert await stage.sink.end_of(leases[0]) == "engine_failed"
            stats = one.stats()
            assert stats.num_outages == death
            assert stats.down.startswith("was ended by SIGKILL")  # and perhaps what a request of ours met
            late = stage.begin()
            for lease in (*leases, late):
                assert await stage.sink.end_of(lease) == "engine_failed"
            assert one.health() is None
            await until_up(one)
            for lease in leases:
                text = stage.sink.texts[lease]
                rest = await stage.text(so_far=text, max_tokens=len(text) + 4, sampling=ON)
                assert text + rest == answer(PROMPT, len(text) + 4)
        assert tmp_path.joinpath("server.log").read_text().count("it listens") == 3

    play(script, tmp_path)


def test_a_server_whose_engine_hangs_is_started_again_although_it_answers(tmp_path):
    async def script(stage: Stage) -> None:
        one = stage.engine
        assert isinstance(one, ServedEngine)
        lease = stage.begin(max_tokens=4000, sampling=ON)
        await stage.sink.some_of(lease)
        server = one._keeper.server
        assert server is not None
        await server.loading.pause()  # behind its back: it tells its figures, and writes nothing
        assert await stage.sink.end_of(lease) == "engine_failed"
        assert one.stats().down == "has samples, and has written nothing for 0.5 s"
        await until_up(one)
        text = stage.sink.texts[lease]
        rest = await stage.text(so_far=text, max_tokens=len(text) + 4, sampling=ON)
        assert text + rest == answer(PROMPT, len(text) + 4)

    play(script, tmp_path, stall_s=0.5)


def test_a_server_with_nothing_to_write_does_not_hang(tmp_path):
    async def script(stage: Stage) -> None:
        one = stage.engine
        assert isinstance(one, ServedEngine)
        await stage.text(max_tokens=4, sampling=ON)
        await asyncio.sleep(2.5)
        assert one.stats().num_outages == 0
        assert await stage.text(max_tokens=4, sampling=ON) == answer(PROMPT, 4)

    play(script, tmp_path, stall_s=0.5)


def test_a_server_that_dies_again_and_again_without_a_token_is_given_up_with_its_error(tmp_path):
    async def script(stage: Stage) -> None:
        while stage.engine.health() is None:
            assert await stage.sink.end_of(stage.begin()) == "engine_failed"
            await asyncio.sleep(0.05)
        why = "the vLLM server died 5 times in a row: ended with code 3: RuntimeError: told to die"
        assert stage.engine.health() == why

    play(script, tmp_path, "--die-when-asked", pause_s=0.01)


def test_a_server_that_cannot_be_started_for_want_of_room_is_started_when_there_is_some(tmp_path, monkeypatch):
    async def script(stage: Stage) -> None:
        assert isinstance(stage.engine, ServedEngine)
        room = tmp_path / "room"
        monkeypatch.setattr(tempfile, "tempdir", str(room))
        assert stage.engine.pid is not None
        os.kill(stage.engine.pid, signal.SIGKILL)
        while "the vLLM server cannot be started: [Errno 2]" not in stage.engine.stats().down:
            await asyncio.sleep(0.01)
        room.mkdir()
        await until_up(stage.engine)
        assert stage.engine.health() is None
        assert await stage.text()

    play(script, tmp_path)


def test_when_the_keeper_itself_fails_samples_end_and_the_engine_says_why(tmp_path):
    async def load() -> ServerLoad:
        raise ZeroDivisionError("a fault\nof ours")

    async def script(stage: Stage) -> None:
        assert isinstance(stage.engine, ServedEngine)
        assert stage.engine.server is not None
        lease = stage.begin(max_tokens=4000, sampling=ON)
        stage.engine.server.load = load
        assert await stage.sink.end_of(lease) == "engine_failed"
        why = "the vLLM server is not kept any more: ZeroDivisionError: a fault of ours"
        assert stage.sink.ends[lease][1] == stage.engine.stats().down == stage.engine.health() == why

    play(script, tmp_path)


def test_a_server_that_cannot_start_says_why_in_a_line(tmp_path):
    async def script() -> None:
        one = standins.engine(tmp_path, "--tokens-per-s", "0")
        with pytest.raises(
            EngineError, match=r"server ended with code 1: ValueError: it cannot start \(its log: .*\)$"
        ):
            await one.start(RecordingSink())
        await one.close()

    asyncio.run(script())


def test_a_log_that_takes_nothing_is_named_and_has_an_end(tmp_path):
    async def script() -> None:
        config = ServedConfig(model=str(standins.save_model(tmp_path / "model")), log="/dev/full", device="cpu")
        one = ServedEngine("vllm", config)
        with pytest.raises(
            EngineError, match=r"^the server's log /dev/full cannot be written: No space left on device$"
        ):
            await one.start(RecordingSink())
        await one.close()
        assert process.tail(Path("/dev/full"), 20) == []

    asyncio.run(asyncio.wait_for(script(), 30.0))


def test_a_port_that_nobody_listens_at_is_said_to_be_one(tmp_path, caplog):
    async def script() -> None:
        url = f"http://127.0.0.1:{process.free_port()}"
        config = ServedConfig(model=str(standins.save_model(tmp_path / "model")), url=url, start_timeout_s=1.0)
        with pytest.raises(
            EngineError, match=r"server at http://.* is not ready after .*: /health: Connection refused$"
        ):
            await ServedEngine("vllm", config).start(RecordingSink())
        assert re.search(r"for \d s: /health: Connection refused", caplog.text)

    caplog.set_level("INFO")
    asyncio.run(asyncio.wait_for(script(), 30.0))


def test_a_check_that_is_ended_while_its_server_starts_leaves_nothing_behind(tmp_path):
    model, temporary = standins.save_model(tmp_path / "model"), tmp_path / "temporary"
    temporary.mkdir()
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o700)
    options = ["--engine", "vllm", "--model", str(model), "--engine-python", str(silent), f"log={tmp_path}/log"]
    with subprocess.Popen(
        [sys.executable, "-m", "polyrl", "worker", "--check", *options, "device=cpu"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    ) as one:
        assert one.stderr is not None
        assert "the vLLM server starts, process" in one.stderr.readline()
        assert list(temporary.iterdir())
        one.terminate()
        assert one.wait(20) == 143
        assert "check: ended by SIGTERM" in one.stderr.read()
    assert not list(temporary.iterdir())


def test_a_server_that_is_not_installed_says_where_to_name_it(tmp_path):
    async def script() -> None:
        model = str(standins.save_model(tmp_path / "model"))
        one = ServedEngine("sglang", ServedConfig(model=model, python=sys.executable, device="cpu"))
        with pytest.raises(EngineError, match=r"No module named 'sglang'; name the environment .* --engine-python"):
            await one.start(RecordingSink())
        assert one.log_file is not None
        one.log_file.unlink()

    asyncio.run(script())


def test_no_sample_is_lost_and_no_worker_either_when_their_servers_are_killed(tmp_path):
    engines = {name: standins.engine(tmp_path / name, "--tokens-per-s", "150") for name in ("a", "b")}
    scenario = Scenario(engines, answer, num_kills=4, num_tokens=150, patience_s=60.0)
    run(scenario.play(tmp_path / "run"), timeout_s=60.0)
    assert scenario.num_killed == 4


def test_after_closing_no_process_of_the_server_is_left(tmp_path):
    pids: list[int] = []

    async def script(stage: Stage) -> None:
        assert isinstance(stage.engine, ServedEngine)
        assert stage.engine.pid is not None
        pids.append(stage.engine.pid)

    play(script, tmp_path)
    assert process.members(pids[0]) == []


def commands() -> list[bytes]:
    """Of all processes that run."""
    found: list[bytes] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return found


def test_a_start_that_is_cancelled_at_any_moment_leaves_no_process(tmp_path):
    sleep = ["sleep", f"60.{os.getpid()}"]
    running = "\0".join(sleep).encode() + b"\0"

    async def is_cancelled_after(num_turns: int) -> bool:
        start = asyncio.create_task(process.ServerProcess.start(LaunchCommand(sleep, {}), tmp_path / "log"))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait([start])
        if not start.cancelled():
            await start.result().kill()
        while running in commands():
            await asyncio.sleep(0.01)
        return start.cancelled()

    async def script() -> None:
        num_turns = 1
        while await is_cancelled_after(num_turns):
            num_turns += 1
        assert num_turns > 5

    asyncio.run(asyncio.wait_for(script(), 20.0))


def test_a_server_dies_with_its_worker_even_if_that_is_killed(tmp_path):
    program = f"""
        import asyncio
        from pathlib import Path
        from polyrl.engines.contract import RecordingSink
        from tests.engines import standins

        async def main():
            one = standins.engine(Path({str(tmp_path)!r}))
            await one.start(RecordingSink())
            print(one.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    assert len(process.members(pid)) == 2
    worker.kill()
    worker.wait()
    until = time.monotonic() + 10.0
    while process.members(pid):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_server_that_is_attached_to_is_not_left_standing_still(tmp_path, monkeypatch, caplog):
    owner, owner_sink = standins.engine(tmp_path), RecordingSink()

    async def guest(url: str) -> Stage:
        one, sink = ServedEngine("vllm", ServedConfig(model=str(tmp_path / "model"), url=url)), RecordingSink()
        return Stage(one, sink, await one.start(sink), PROMPT)

    async def script() -> None:
        await owner.start(owner_sink)
        server = owner.server
        assert server is not None
        monkeypatch.setenv(KEY_VARIABLE, server.http.key)
        leaves = give_way((await guest(server.http.url)).engine, put_s=0.3)
        install = asyncio.create_task(leaves.install(Weights(Version(1), folder="anywhere")))
        await asyncio.sleep(0.1)
        install.cancel()
        await leaves.close()
        owner.generate(Job(LeaseId(1), SampleId(1), PROMPT, [], 16, 1, ON))
        assert await owner_sink.end_of(LeaseId(1)) == "length"
        await server.loading.pause()  # and one that is killed in an install does not resume
        stage = await guest(server.http.url)
        assert stage.info.version is None, "somebody else's, of whatever run"
        await give_way(stage.engine).install(Weights(Version(0)))  # what its directory holds needs no other source
        assert await stage.text()
        await stage.engine.close()
        await owner.close()

    asyncio.run(asyncio.wait_for(script(), 30.0))
    assert "never retrieved" not in caplog.text


def test_a_server_whose_worker_was_killed_in_an_install_is_not_believed_to_run_what_its_label_says(url, tmp_path):
    config = ServedConfig(model=str(standins.save_model(tmp_path / "model")), url=url)

    async def version(*, after: str = "") -> Version | None:
        http, one = Http(url), ServedEngine("vllm", config)
        if after:
            await http.post(after, timeout_s=5.0)
        info = await one.start(RecordingSink())
        assert not (await http.get("/is_paused", timeout_s=5.0))["is_paused"]
        await one.close()
        await http.close()
        return info.version

    async def script() -> None:
        assert await version() == 0
        assert await version(after="/pause") is None
        assert await version() == 0

    asyncio.run(asyncio.wait_for(script(), 30.0))


def test_a_server_that_is_attached_to_and_breaks_is_not_left_standing_still(url, tmp_path):
    async def script() -> None:
        config, sink = ServedConfig(model=str(standins.save_model(tmp_path / "model")), url=url), RecordingSink()
        broken = ServedEngine("vllm", config)
        await broken.start(sink)
        give_way(broken, put=ServerBroken("half of it is there"))
        broken.generate(Job(LeaseId(1), SampleId(1), PROMPT, [], 4000, 1, ON))
        await sink.some_of(LeaseId(1))
        with pytest.raises(ServerBroken):
            await broken.install(Weights(Version(1), folder="anywhere"))
        num = len(sink.texts[LeaseId(1)])
        assert await sink.end_of(LeaseId(1)) == "engine_failed"
        await asyncio.sleep(0.1)
        assert broken.health() == "cannot be trusted any more: half of it is there"
        assert len(sink.texts[LeaseId(1)]) == num, "nobody can stamp what it writes now"
        await broken.close()
        async with aiohttp.ClientSession() as others:
            body = {"request_id": "another", "token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
            body["sampling_params"]["stop_token_ids"] = []
            async with others.post(f"{url}/inference/v1/generate", json=body) as reply:
                assert b"[DONE]" in await reply.read()

    asyncio.run(asyncio.wait_for(script(), 30.0))


def test_a_check_of_a_server_that_is_attached_to_puts_its_version_back(url, tmp_path, monkeypatch):
    """And replaces nothing that somebody else has installed there."""
    monkeypatch.setattr("polyrl.engines.served.vllm.VllmWeightLoading", lambda http, _: Scripted(http))
    config = ServedConfig(model=str(standins.save_model(tmp_path / "model")), url=url)

    said: list[str] = []

    async def checked() -> None:
        engine = ServedEngine("vllm", config)
        try:
            await check(engine, config.model, said.append)
        finally:
            await engine.close()

    async def script() -> None:
        await checked()
        http = Http(url)
        assert (await http.get("/weight_info", timeout_s=5.0))["weight_version"] == "0"
        await http.post("/update_weight_version", {"new_version": "37"}, timeout_s=5.0)
        with pytest.raises(EngineError, match="a check would replace them; expected one that was just started"):
            await checked()
        assert (await http.get("/weight_info", timeout_s=5.0))["weight_version"] == "37"
        await http.post("/update_weight_version", {"new_version": "default"}, timeout_s=5.0)
        await http.close()

    asyncio.run(asyncio.wait_for(script(), 30.0))
    assert said[-3:-1] == ["put version 0 back", "all is well"]


def test_a_server_of_another_model_is_not_attached_to(url, tmp_path):
    async def script() -> None:
        model = standins.save_model(tmp_path / "model", vocab_size=1024)
        one = ServedEngine("vllm", ServedConfig(model=str(model), url=url))
        with pytest.raises(EngineError, match=r"runs the model in .*, which is not that of --model .*: .* 512 ids"):
            await one.start(RecordingSink())
        await one.close()

    asyncio.run(asyncio.wait_for(script(), 30.0))


def test_a_server_that_is_left_before_an_install_began_is_not_paused(url, tmp_path):
    async def script() -> None:
        config = ServedConfig(model=str(standins.save_model(tmp_path / "model")), url=url)
        one = ServedEngine("vllm", config)
        await one.start(RecordingSink())
        assert one.server is not None
        loading = one.server.loading = Scripted(one.server.http, stage_s=1.0)
        install = asyncio.create_task(one.install(Weights(Version(1), folder="anywhere")))
        await asyncio.sleep(0.01)
        await one.close()
        with pytest.raises(EngineError, match="closed before the weights were in place"):
            await install
        assert loading.num_pauses == 0

    asyncio.run(asyncio.wait_for(script(), 30.0))


def test_a_server_that_is_attached_to_and_goes_away_ends_the_engine(tmp_path, monkeypatch):
    async def script() -> None:
        owner, guest_sink = standins.engine(tmp_path), RecordingSink()
        await owner.start(RecordingSink())
        server = owner._keeper.server
        assert server is not None
        stranger = Http(server.http.url, "a guess")
        with pytest.raises(ServerAnswered, match="/health answered 401"):
            await stranger.get("/health", timeout_s=5.0)
        await stranger.close()
        guest = ServedEngine("vllm", ServedConfig(model=str(tmp_path / "model"), url=server.http.url))
        with pytest.raises(EngineError, match="wants another key; POLYRL_ENGINE_KEY"):
            await guest.start(guest_sink)
        monkeypatch.setenv(KEY_VARIABLE, server.http.key)
        guest = ServedEngine("vllm", ServedConfig(model=str(tmp_path / "model"), url=server.http.url))
        await guest.start(guest_sink)
        guest.generate(Job(LeaseId(1), SampleId(1), PROMPT, [], 4000, 1, ON))
        await guest_sink.some_of(LeaseId(1))
        await owner.close()
        assert await guest_sink.end_of(LeaseId(1)) == "engine_failed"
        while guest.health() is None:
            await asyncio.sleep(0.01)
        await guest.close()

    asyncio.run(asyncio.wait_for(script(), 30.0))
