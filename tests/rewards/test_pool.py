"""The pool with real processes: whatever a function does, it hurts its own answer only, and nothing is left behind."""

import asyncio
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.rewards.own_rewards import NAP_S

from polyrl.errors import ConfigError
from polyrl.rewards.line import Surroundings
from polyrl.rewards.messages import Began, FunctionRequest, Reply, RewardSetup, decode_reply, encode, take_messages
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput, RewardTimedOut
from polyrl.run.event_loop import run_loop

Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def _modules_of_a_person(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def given(answer: str = "abc", **row: object) -> RewardInput:
    return RewardInput("1+2=", answer, "abc", dict(row), "stop", len(answer) + 1)


def with_pool(
    body: Callable[[RewardPool], Awaitable[Result]],
    processes: int = 1,
    timeout_s: float = 20.0,
    surroundings: Surroundings | None = None,
) -> Result:
    """Runs, closes, and sees that no process is left."""

    async def run() -> Result:
        pool = RewardPool(processes, timeout_s, surroundings=surroundings)
        try:
            return await body(pool)
        finally:
            pids = pool.pids
            await pool.close()
            assert not [pid for pid in pids if is_running(pid)]

    return run_loop(run())


async def score(pool: RewardPool, name: str, asked: RewardInput | None = None) -> float:
    return (await pool.score(f"own_rewards:{name}", given() if asked is None else asked)).score


def is_running(pid: int) -> bool:
    """A zombie that nobody has waited for is none."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def ends_soon(pid: int) -> bool:
    until = time.monotonic() + 20.0
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not is_running(pid)


def test_plain_functions_get_the_whole_input_and_return_any_real_number():
    async def body(pool: RewardPool) -> list[float]:
        return [
            await score(pool, "length", given("four")),
            await score(pool, "echo_row", given("x", values=[1, 20.5], text="é", nested={"a": None})),
            await score(pool, "is_true", given("abc")),
            (await pool.score("arithmetic", given("1+1=abc"))).score,
        ]

    assert with_pool(body) == [4.0, 22.5, 1.0, 1.0]


def test_processes_load_neither_torch_nor_transformers_nor_numpy():
    assert with_pool(lambda pool: score(pool, "loaded_modules")) == 0.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "KeyError: 'no such thing\\nin two lines' (PLACE, in raises)"),
        ("exits", "SystemExit: 3 (PLACE, in exits)"),
        ("not_a_number", "returned nan, expected a finite number"),
        ("a_text", "returned '1.0', expected a number"),
        ("nothing", "returned None, expected a number"),
        ("dies", "its process ended: exit code 1"),
        ("async_raises", "TimeoutError: its own (PLACE, in async_raises)"),
        ("a_text_among_parts", "returned extracted = '42', expected a number"),
        ("too_many_parts", "returned 1000 parts, expected at most 32"),
        ("async_text", "returned 'good', expected a number"),
        ("raises_the_unspeakable", "Unspeakable"),
        ("async_raises_the_unspeakable", "Unspeakable"),
        ("too_much", "returned -1e+308, expected a number of at most 1e+09"),
        ("too_much_together", "returned 1.2e+09, expected a number of at most 1e+09"),
    ],
)
def test_what_goes_wrong_is_a_failure_with_its_reason_and_the_next_answer_is_scored(name: str, reason: str):
    async def body(pool: RewardPool) -> tuple[str, float]:
        with pytest.raises(RewardFailed) as failed:
            await score(pool, name)
        return re.sub(r"\([^()]*own_rewards\.py:\d+", "(PLACE", str(failed.value)), await score(pool, "length")

    assert with_pool(body) == (reason, 3.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("forges_a_number", "returned score = inf, expected a finite"), ("forges_a_reason", r"\x1b[2Ja line and another")],
)
def test_what_a_function_says_in_its_process_s_name_is_checked_too(name: str, reason: str):
    async def body(pool: RewardPool) -> str:
        with pytest.raises(RewardFailed) as failed:
            await score(pool, name)
        return str(failed.value)

    assert with_pool(body).startswith(reason)


@pytest.mark.parametrize("name", ["sleeps", "waits_for_ever"])
def test_what_takes_too_long_is_ended_and_the_next_answer_is_scored(name: str):
    async def body(pool: RewardPool) -> float:
        with pytest.raises(RewardTimedOut, match=r"took longer than 0\.5 s"):
            await score(pool, name)
        return await score(pool, "length")

    assert with_pool(body, timeout_s=0.5) == 3.0


def test_async_functions_share_processes_and_none_runs_in_the_trainer():
    async def body(pool: RewardPool) -> set[float]:
        return set(await asyncio.gather(*(score(pool, "async_pid") for _ in range(20))))

    pids = with_pool(body, processes=2)
    assert 1 <= len(pids) <= 2 and os.getpid() not in pids


def test_async_functions_run_beside_each_other_in_a_process():
    async def body(pool: RewardPool) -> int:
        asking = [asyncio.create_task(score(pool, "waits_for_ever")) for _ in range(8)]
        most = 0
        while most < 8:
            await asyncio.sleep(0.01)
            most = max(most, pool.state().running)
        for task in asking:
            task.cancel()
        return most

    assert with_pool(body) == 8


@pytest.mark.parametrize("processes", [1, 2])
def test_an_async_function_of_a_person_runs_beside_none_of_ours(processes: int):
    async def body(pool: RewardPool) -> tuple[int, int]:
        own = asyncio.create_task(score(pool, "waits_for_ever"))
        while not pool.state().running:
            await asyncio.sleep(0.01)
        ours = asyncio.create_task(pool.score("code", given("print(1)", tests=[{"stdin": "", "stdout": "1"}])))
        if processes > 1:
            await asyncio.wait([ours])  # with a reward, or without bubblewrap
        else:
            assert not (await asyncio.wait([ours], timeout=0.5))[0]
        found = len(pool.pids), pool.state().waiting
        for one in (own, ours):
            one.cancel()
        await asyncio.gather(own, ours, return_exceptions=True)
        return found

    assert with_pool(body, processes) == (processes, 2 - processes)


def test_functions_of_a_person_and_ours_that_come_in_turn_do_not_run_one_at_a_time():
    """Where they take turns, a turn is for as many as may run together."""

    async def body(pool: RewardPool) -> float:
        ours = given("print(1)")._replace(expected="2")
        await asyncio.gather(score(pool, "naps"), pool.score("code", ours), return_exceptions=True)
        mixed = [one for _ in range(8) for one in (score(pool, "naps"), pool.score("code", ours))]
        found = await asyncio.gather(*mixed, return_exceptions=True)  # without bubblewrap, ours have no reward
        return max(one for one in found if isinstance(one, float))

    assert with_pool(body) == 8


def test_no_stream_of_functions_keeps_a_process_from_another():
    async def body(pool: RewardPool) -> int:
        await score(pool, "naps")
        num_done = 0

        async def naps() -> None:
            nonlocal num_done
            while True:
                await score(pool, "naps")
                num_done += 1

        stream = [asyncio.create_task(naps()) for _ in range(24)]
        await asyncio.sleep(NAP_S / 2)
        await asyncio.wait_for(score(pool, "length"), 20.0)
        for one in stream:
            one.cancel()
        await asyncio.gather(*stream, return_exceptions=True)
        return num_done

    assert with_pool(body) <= 24 + 16


def test_what_a_function_leaves_in_its_event_loop_does_not_run_beside_ours():
    async def body(pool: RewardPool) -> tuple[float, float]:
        await score(pool, "leaves_a_task")
        before = await score(pool, "beats")
        ours = given("import time; time.sleep(0.5)")._replace(expected="2")
        await asyncio.gather(pool.score("code", ours), return_exceptions=True)
        return before, await score(pool, "beats")

    before, after = with_pool(body)
    assert after - before <= 1


def test_every_process_fills_up_with_async_functions_from_the_first_answers_on():
    """The second process to begin one has room as well, before any answer has ended."""

    async def body(pool: RewardPool) -> int:
        waiting = [asyncio.create_task(score(pool, "waits_for_ever")) for _ in range(40)]
        until = time.monotonic() + 15
        while pool.state().running < 16 and time.monotonic() < until:
            await asyncio.sleep(0.05)
        running = pool.state().running
        for one in waiting:
            one.cancel()
        return running

    assert with_pool(body, processes=2) == 16


def test_one_process_alone_starts_what_async_functions_share_when_the_first_answers_come_together(tmp_path: Path):
    """A reward model is not loaded once for each of the first answers."""
    notes = tmp_path / "notes"

    async def body(pool: RewardPool) -> None:
        asked = [pool.score("own_rewards:CountedAsync", given(), {"notes": str(notes)}) for _ in range(8)]
        await asyncio.gather(*asked)

    with_pool(body, processes=8)
    assert notes.read_text().split().count("made") == 1


def test_async_functions_that_are_asked_for_in_one_breath_run_beside_each_other():
    """Whatever the process reads together with the first of them waits for nobody."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "polyrl.rewards.process", str(theirs.fileno())]
    asks = [FunctionRequest(bytes([n]), "reward", "own_rewards:waits_for_ever", {}, given(), 3600.0) for n in range(8)]
    with ours, theirs, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as process:
        try:
            ours.settimeout(20.0)
            ours.sendall(b"".join(map(encode, (RewardSetup(list(sys.path), 0), *asks))))
            buffer = bytearray()
            replies: list[Reply] = []
            while len(replies) < 8:
                buffer += ours.recv(1 << 16)
                replies += map(decode_reply, take_messages(buffer))
        finally:
            process.kill()
    assert replies == [Began(ask.nonce, True) for ask in asks]


def test_an_async_function_that_blocks_holds_up_neither_the_trainer_nor_its_time_limit():
    """The caller's event loop goes on, and the answer is given up when its time is over."""

    async def body(pool: RewardPool) -> tuple[int, str, float]:
        asking = asyncio.create_task(score(pool, "blocks"))
        num_turns = 0
        while not asking.done():
            await asyncio.sleep(0.01)
            num_turns += 1
        return num_turns, str(asking.exception()), await score(pool, "length")

    num_turns, why, after = with_pool(body, timeout_s=0.5)
    assert num_turns > 10 and why == "took longer than 0.5 s" and after == 3.0


@pytest.mark.parametrize(("name", "bad", "reason"), [
    ("blocks_if_told", "block", "took longer than 1 s"),
    ("dies_if_told", "die", "its process ended: exit code 7"),
])  # fmt: skip
def test_an_async_function_that_takes_its_process_along_hurts_its_own_answer_only(name: str, bad: str, reason: str):
    async def body(pool: RewardPool) -> list[float | BaseException]:
        answers = ["a", "bb", bad, "cccc", "ddddd", "eeeeee"]
        await score(pool, name)  # from here on it is known to be async
        return await asyncio.gather(*(score(pool, name, given(one)) for one in answers), return_exceptions=True)

    found = with_pool(body, processes=2, timeout_s=1.0)
    assert [one for one in found if isinstance(one, float)] == [1.0, 2.0, 4.0, 5.0, 6.0]
    assert str(found[2]) == reason


def test_a_plain_function_may_run_an_event_loop_of_its_own():
    async def body(pool: RewardPool) -> list[float]:
        return [await score(pool, name) for name in ("runs_a_loop", "waits", "runs_a_loop", "waits")]

    assert with_pool(body) == [0.5] * 4


# Code that a model wrote, run by a function in its own process


@pytest.mark.parametrize("name", ["writes_everywhere", "writes_a_byte", "announces_gigabytes", "nests_without_end"])
def test_a_forged_reply_scores_nobody_and_shifts_no_reward(name: str, caplog: pytest.LogCaptureFixture):
    async def body(pool: RewardPool) -> tuple[float | BaseException, list[float]]:
        (forged,) = await asyncio.gather(score(pool, name), return_exceptions=True)
        return forged, [await score(pool, "length", given("x" * number)) for number in range(5)]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forged, after = with_pool(body, timeout_s=4.0)  # a reply that was begun and does not end is waited for so long
    assert isinstance(forged, RewardFailed) or forged == 1.0, "its own, or none"
    assert after == [0.0, 1.0, 2.0, 3.0, 4.0]
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 100, "a reply that is announced as gigabytes is not read"
    assert not caplog.records, "it is no bug of ours, with a traceback"


def test_a_thread_that_stays_behind_and_writes_hurts_nobody_else():
    async def body(pool: RewardPool) -> list[float]:
        await score(pool, "writes_late")
        rewards: list[float] = []
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            rewards.append(await score(pool, "length"))
        return rewards

    assert set(with_pool(body)) == {3.0}


@pytest.mark.parametrize("name", ["from_a_fork", "from_a_program"])
def test_what_a_function_starts_has_no_line_to_the_trainer(name: str):
    async def body(pool: RewardPool) -> list[float]:
        return [await score(pool, one) for one in (name, "own_pid", name, "own_pid")]

    first, pid, second, same_pid = with_pool(body)
    assert first == second == 1.0 and pid == same_pid, "nothing came over the line that ended the process"


def test_a_function_that_closes_the_line_fails_by_itself():
    async def body(pool: RewardPool) -> float:
        with pytest.raises(RewardFailed):
            await score(pool, "closes_everything")
        return await score(pool, "length")

    assert with_pool(body) == 3.0


def test_secrets_of_the_environment_are_withheld_unless_the_recipe_names_them(monkeypatch: pytest.MonkeyPatch):
    names = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_API_KEY"]
    for name in (*names, "TOKENIZERS_PARALLELISM", "MYSQL_PWD", "SENTRY_DSN", "SLACK_WEBHOOK_URL"):
        monkeypatch.setenv(name, "x")
    for name, value in (("HTTP_PROXY", "http://proxy:3128"), ("DATABASE_URL", "postgres://me:hidden@10.0.0.5/rows")):
        monkeypatch.setenv(name, value)

    async def body(pool: RewardPool) -> list[float]:
        fine, not_fine = ("TOKENIZERS_PARALLELISM", "PATH", "HTTP_PROXY"), ("MYSQL_PWD", "SENTRY_DSN", "DATABASE_URL")
        tried = (*names, *fine, *not_fine, "SLACK_WEBHOOK_URL")
        return [await score(pool, "the_environment", given(name)) for name in tried]

    kept = Surroundings(environment=("OPENAI_API_KEY",))
    assert with_pool(body, surroundings=kept) == [0.0] * 4 + [1.0] * 4 + [0.0] * 4


def test_a_function_that_misses_a_withheld_variable_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", "x")
    with pytest.raises(RewardFailed, match=r"JUDGE_API_KEY is withheld from rewards: name it in rewards.environment"):
        with_pool(lambda pool: score(pool, "needs_a_key"))


def test_a_function_that_wants_too_much_memory_fails_by_itself():
    async def body(pool: RewardPool) -> float:
        with pytest.raises(RewardFailed, match=r"MemoryError.*rewards.memory_gb = 1 is what a process may have"):
            await score(pool, "eats_memory")
        return await score(pool, "length")

    assert with_pool(body, surroundings=Surroundings(memory_bytes=1 << 30)) == 3.0


# What a person sees


def test_an_exception_is_shown_with_its_file_and_line_and_what_was_printed_is_in_the_log(tmp_path: Path):
    log = tmp_path / "rewards.log"
    with pytest.raises(RewardFailed) as failed:
        with_pool(lambda pool: score(pool, "prints_and_raises"), surroundings=Surroundings(log=log))
    lines = (Path(__file__).parent / "own_rewards.py").read_text().splitlines()
    number = next(place for place, line in enumerate(lines, 1) if "the line that a person wants to see" in line)
    assert str(failed.value).startswith("KeyError: 'missing' (") and f"own_rewards.py:{number}, in _inner)" in str(
        failed.value
    )
    assert str(log) in str(failed.value)
    printed = log.read_text()
    assert "looking at abc" in printed and "Traceback" in printed and f"line {number}" in printed


def test_where_a_function_hung_is_in_the_log(tmp_path: Path):
    log = tmp_path / "rewards.log"
    with pytest.raises(RewardTimedOut, match=r"rewards.log"):
        with_pool(lambda pool: score(pool, "prints_and_hangs"), timeout_s=0.5, surroundings=Surroundings(log=log))
    assert "about to hang" in log.read_text() and "in sleeps" in log.read_text()


def test_the_log_does_not_grow_without_end(tmp_path: Path):
    log = tmp_path / "rewards.log"

    async def body(pool: RewardPool) -> list[int]:
        sizes: list[int] = []
        for _ in range(2):
            log.write_bytes(bytes(17 << 20))
            await score(pool, "length")
            sizes.append(log.stat().st_size)
        return sizes

    assert max(with_pool(body, surroundings=Surroundings(log=log))) < 1 << 20


@pytest.mark.parametrize(
    ("name", "reward"),
    [
        ("parts", Reward(3.25, {"format": 0.25, "length": 3.0})),
        ("score_and_parts", Reward(7.0, {"format": 0.25})),
        ("a_reward", Reward(2.0, {"style": 0.5})),
        ("length", Reward(3.0, {})),
    ],
)
def test_a_function_may_return_named_parts(name: str, reward: Reward):
    assert with_pool(lambda pool: pool.score(f"own_rewards:{name}", given()))._replace(cpu_s=None) == reward


def test_a_function_gets_the_arguments_of_the_recipe():
    arguments = {"bonus": 0.5, "words": ["a", "b"]}
    assert with_pool(lambda pool: pool.score("own_rewards:with_arguments", given(), arguments)).score == 2.5


def test_a_function_that_prints_a_lot_is_scored_and_nobody_hears_it(capfd: pytest.CaptureFixture[str]):
    assert with_pool(lambda pool: score(pool, "prints_a_lot")) == 1.0
    assert capfd.readouterr() == ("", "")


def test_children_end_with_the_pool():
    child = int(with_pool(lambda pool: score(pool, "forks_and_returns")))
    assert ends_soon(child)


def test_children_end_with_the_process_that_started_them(tmp_path: Path):
    pid_file = tmp_path / "pid"

    async def body(pool: RewardPool) -> bool:
        with pytest.raises(RewardFailed, match="its process ended: exit code 1"):
            await score(pool, "forks_and_dies", given(pid_file=str(pid_file)))
        return await asyncio.to_thread(ends_soon, int(pid_file.read_text()))

    assert with_pool(body)


def test_a_forked_child_never_answers_for_its_parent():
    async def body(pool: RewardPool) -> list[float]:
        return [await score(pool, "both_return") for _ in range(5)]

    assert with_pool(body) == [1.0] * 5


def test_there_are_never_more_processes_than_allowed_and_they_are_used_again():
    async def body(pool: RewardPool) -> set[float]:
        return set(await asyncio.gather(*(score(pool, "own_pid") for _ in range(30))))

    assert len(with_pool(body, processes=2)) <= 2


def test_a_process_that_was_killed_while_it_waited_hurts_nobody():
    async def body(pool: RewardPool) -> float:
        await score(pool, "length")
        (process,) = pool._processes
        assert process.pid is not None
        os.kill(process.pid, 9)
        while process.is_usable:
            await asyncio.sleep(0.01)
        return await score(pool, "length")

    assert with_pool(body) == 3.0


def test_an_answer_that_nobody_waits_for_leaves_its_process_in_use():
    async def body(pool: RewardPool) -> float:
        asking = asyncio.create_task(score(pool, "length"))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return await score(pool, "length")

    assert with_pool(body) == 3.0


def test_closing_while_functions_run_ends_them():
    async def run() -> list[int]:
        pool = RewardPool(2, 60.0)
        asking = [asyncio.create_task(score(pool, "sleeps")) for _ in range(4)]
        while len(pool.pids) < 2:
            await asyncio.sleep(0.01)
        pids = pool.pids
        await pool.close()
        await asyncio.gather(*asking, return_exceptions=True)
        return pids

    assert not [pid for pid in asyncio.run(run()) if is_running(pid)]


def test_processes_end_with_the_trainer_even_if_it_is_killed():
    program = """
import asyncio
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import RewardInput
async def main():
    pool = RewardPool(1, 600.0)
    asking = asyncio.create_task(pool.score("own_rewards:sleeps", RewardInput("", "", "", {}, "stop", 0)))
    while not pool.pids:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    print(pool.pids[0], flush=True)
    await asking
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parent
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert is_running(pid)
    trainer.kill()
    trainer.communicate()
    assert ends_soon(pid)


def test_a_row_that_is_no_plain_data_fails_by_itself():
    async def body(pool: RewardPool) -> float:
        with pytest.raises(RewardFailed, match="the row is no plain data"):
            await score(pool, "length", given(half="\ud800"))
        return await score(pool, "length")

    assert with_pool(body) == 3.0


@pytest.mark.parametrize("number", [1 << 63, 1 << 64, -(1 << 64), -(1 << 63) - 1, 1 << 80, 1 << 20_000], ids=range(6))
def test_a_row_may_have_integers_of_any_size(number: int):
    row = {"value": number, "within": [{"list": [number, 1, True]}]}
    expected = {"value": number, "within": [{"list": [number, 1, True]}]}

    async def body(pool: RewardPool) -> float:
        return await score(pool, "num_bits", given(**row))

    assert with_pool(body) == 2 * number.bit_length() + 1
    assert row == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "aritmetic",
            'reward: unknown name "aritmetic"; expected arithmetic, math, code, judge, reward_model, or module',
        ),
        ("no_such_module:f", 'reward: "no_such_module:f": no_such_module cannot be imported'),
        ("own_rewards:nope", 'reward: "own_rewards:nope": own_rewards has no function nope'),
        ("own_rewards:some_value", "own_rewards has no function some_value"),
    ],
)
def test_a_name_that_stands_for_no_function_is_the_persons_mistake(name: str, message: str):
    with pytest.raises(ConfigError) as wrong:
        with_pool(lambda pool: pool.score(name, given()))
    assert message in str(wrong.value)
