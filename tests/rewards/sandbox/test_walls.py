"""Reward functions within walls, by a real bubblewrap: what they cannot reach, and that honest ones notice nothing."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.rewards.sandbox.conftest import Outside

from polyrl.config.rewards import WeightedReward
from polyrl.errors import ConfigError
from polyrl.rewards import weighing
from polyrl.rewards.groups import AnswerFacts, make_group
from polyrl.rewards.line import Surroundings
from polyrl.rewards.lookup import check_functions
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput, RewardTimedOut
from polyrl.rewards.sandbox.walls import RewardWalls, look_for_walls

T = TypeVar("T")
pytestmark = pytest.mark.usefixtures("bubblewrap")
MINE = '''
import os, pathlib, resource, signal, socket, subprocess, sys, tempfile, threading, time

def honest(given):
    """Files beside the module and in /tmp, threads, processes, a library."""
    import msgspec
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write(given.answer)
    bonus = []
    thread = threading.Thread(target=lambda: bonus.append(0.5))
    thread.start()
    thread.join()
    said = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True).stdout
    words = pathlib.Path(__file__).with_name("words.txt").read_text().split()
    return {"in_words": given.answer in words, "ran": int(said), "bonus": bonus[0]}

def lengths(given):
    return [len(one.answer) for one in given.answers]

class Later:
    async def start(self):
        self.num = 1

    async def __call__(self, given):
        self.num += 1
        return self.num

def _tried(make):
    try:
        make()
    except OSError as error:
        return {"score": 0, "errno": error.errno}
    return 1

def connects(given):
    return _tried(lambda: socket.create_connection(("127.0.0.1", given.row["port"]), timeout=2))

def connects_by_name(given):
    return _tried(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + given.row["socket"]))

def reads(given):
    return _tried(lambda: open(given.row["path"]).read())

def writes(given):
    return _tried(lambda: open(given.row["path"], "a").write("x"))

def writes_beside(given):
    return _tried(lambda: open(os.path.join(os.path.dirname(__file__), "new"), "w").close())

def lists_runs(given):
    return {"run": len(os.listdir("runs/tiny")) if os.path.isdir("runs/tiny") else 0, "runs": len(os.listdir("runs"))}

def kills(given):
    for pid in (given.row["pid"], os.getppid(), 1):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.2)
    return float(os.getppid() == 1)

def sees(given):
    return len([one for one in os.listdir("/proc") if one.isdigit()])

def mounts(given):
    import ctypes
    return float(ctypes.CDLL(None).unshare(0x10000000))

def leaves_a_file(given):
    found = os.path.exists("/tmp/left")
    open("/tmp/left", "w").close()
    return found

def leaves_a_child(given):
    subprocess.Popen(["sleep", given.row["seconds"]], start_new_session=True)
    return 1.0

def dies(given):
    os._exit(7)

def crashes(given):
    os.kill(os.getpid(), signal.SIGSEGV)

def loops(given):
    while given.answer == "loop":
        pass
    return 1.0

def the_environment(given):
    return float(given.answer in os.environ)

def limits(given):
    data, core = resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_CORE)[1]
    return {"score": 1.0, "data": data, "core": core}

def sleeps_soundly(given):
    time.sleep(3600)
'''


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the functions, a run's directory in it, and we are there."""
    folder = tmp_path / "desk"
    (folder / "runs" / "tiny").mkdir(parents=True)
    (folder / "runs" / "tiny" / "admin.token").write_text("secret")
    (folder / "walled_rewards.py").write_text(MINE)
    (folder / "words.txt").write_text("good answers")
    monkeypatch.chdir(folder)
    return folder


def walls(run_dir: str = "runs/tiny") -> RewardWalls:
    return look_for_walls(["walled_rewards:any"], Path(run_dir))


def with_pool(body: Callable[[RewardPool], Awaitable[T]], timeout_s: float = 30.0, **settings: object) -> T:
    async def run() -> T:
        surroundings = Surroundings(**{"walls": walls(), **settings})  # type: ignore[arg-type]
        pool = RewardPool(2, timeout_s, surroundings=surroundings)
        try:
            return await body(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def given(answer: str = "good", **row: object) -> RewardInput:
    return RewardInput("p", answer, "", dict(row), "stop", 1)


def score(name: str, answer: str = "good", **row: object) -> Reward:
    return with_pool(lambda pool: pool.score(f"walled_rewards:{name}", given(answer, **row)))


def test_an_honest_function_notices_nothing(desk: Path):
    assert score("honest").parts == {"in_words": 1.0, "ran": 1.0, "bonus": 0.5}
    assert score("honest", "bad").parts["in_words"] == 0.0


def test_classes_and_functions_of_groups_work_too(desk: Path):
    async def body(pool: RewardPool) -> tuple[float, list[Reward | None]]:
        await pool.score("walled_rewards:Later", given())
        later = await pool.score("walled_rewards:Later", given())
        return later.score, await pool.score_group(
            "walled_rewards:lengths", make_group(given(), [AnswerFacts("a", "stop", 1), AnswerFacts("bb", "stop", 2)])
        )

    assert with_pool(body) == (3.0, [Reward(1.0), Reward(2.0)])


def test_there_is_no_network(desk: Path, outside: Outside):
    for name in ("connects", "connects_by_name"):
        row = given(port=outside.port, socket=outside.socket_name)
        assert with_pool(lambda pool, name=name, row=row: pool.score(f"walled_rewards:{name}", row)).score == 0.0
        assert (
            with_pool(lambda pool, name=name, row=row: pool.score(f"walled_rewards:{name}", row), walls=None).score
            == 1.0
        )


def test_files_are_those_of_the_system_and_of_the_module_and_none_can_be_written(desk: Path, tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    assert score("reads", path=str(desk / "words.txt")).score == 1.0
    for path in (str(secret), "/etc/passwd", os.path.expanduser("~/.profile"), str(tmp_path)):
        assert score("reads", path=path).score == 0.0, path
    for path in (str(desk / "words.txt"), "/usr/new", "/new", "/root/new"):
        assert score("writes", path=path).score == 0.0, path
    assert score("writes", path=str(secret)).score == 1.0, "a file of that name, in a /tmp of its own"
    assert score("writes_beside").score == 0.0 and not (desk / "new").exists()
    assert secret.read_text() == "secret" and (desk / "words.txt").read_text() == "good answers"


def test_the_tokens_of_runs_are_hidden(desk: Path, tmp_path: Path):
    assert (desk / "runs/tiny/admin.token").read_text() == "secret"
    assert score("reads", path=str(desk / "runs/tiny/admin.token")).score == 0.0
    assert score("lists_runs").parts == {"run": 0.0, "runs": 0.0}
    elsewhere = desk / "deep" / "run"
    elsewhere.mkdir(parents=True)
    (elsewhere / "admin.token").write_text("secret")
    row = given(path=str(elsewhere / "admin.token"))
    assert with_pool(lambda pool: pool.score("walled_rewards:reads", row)).score == 1.0, "it is a folder like any other"
    hidden = look_for_walls(["walled_rewards:any"], elsewhere)
    assert with_pool(lambda pool: pool.score("walled_rewards:reads", row), walls=hidden).score == 0.0


def test_no_process_outside_can_be_seen_or_killed(desk: Path, outside: Outside):
    assert score("kills", pid=outside.pid).score == 1.0, "its parent is the first process of its own tree"
    assert score("sees").score <= 3


def test_no_namespace_can_be_made(desk: Path):
    assert score("mounts").score == -1.0


def test_tmp_is_a_process_s_own(desk: Path):
    assert [score("leaves_a_file").score for _ in range(2)] == [0.0, 0.0]
    assert not Path("/tmp/left").exists()


def test_a_child_that_leaves_its_process_group_ends_with_its_process(desk: Path):
    seconds = f"3600.{os.getpid()}"
    assert score("leaves_a_child", seconds=seconds).score == 1.0
    until = time.monotonic() + 5.0
    while time.monotonic() < until and seconds in _commands():
        time.sleep(0.05)
    assert seconds not in _commands()


def _commands() -> str:
    found = [one / "cmdline" for one in Path("/proc").iterdir() if one.name.isdigit()]
    texts = []
    for one in found:
        try:
            texts.append(one.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(one for one in texts if one.startswith("sleep "))


@pytest.mark.parametrize(("name", "reason"), [("dies", "exit code 7"), ("crashes", "signal 11")])
def test_a_function_that_ends_its_process_is_told_of_as_without_walls(desk: Path, name: str, reason: str):
    async def body(pool: RewardPool) -> float:
        with pytest.raises(RewardFailed, match=reason):
            await pool.score(f"walled_rewards:{name}", given())
        return (await pool.score("walled_rewards:the_environment", given("PATH"))).score

    assert with_pool(body) == 1.0


def test_a_loop_ends_at_its_limit_of_cpu_time(desk: Path):
    async def body(pool: RewardPool) -> Reward:
        loops = [WeightedReward(function="walled_rewards:loops")]
        return await weighing.score(pool, loops, given("loop")._replace(limit_s=0.3))

    assert with_pool(body) == Reward(0.0, {}, "timed_out", 0.3, False)


def test_a_function_that_takes_too_long_is_ended_and_leaves_its_stack_in_the_log(desk: Path, tmp_path: Path):
    log = tmp_path / "rewards.log"

    async def body(pool: RewardPool) -> None:
        with pytest.raises(RewardTimedOut, match=r"took longer than 0\.5 s"):
            await pool.score("walled_rewards:sleeps_soundly", given())

    with_pool(body, 0.5, log=log)
    assert "in sleeps_soundly" in log.read_text()


def test_the_environment_is_a_short_list_and_what_the_recipe_names(desk: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("MY_SETTING", "JUDGE_API_KEY", "OTHER_API_KEY"):
        monkeypatch.setenv(name, "x")

    async def body(pool: RewardPool) -> dict[str, float]:
        names = ("PATH", "MY_SETTING", "JUDGE_API_KEY", "OTHER_API_KEY")
        return {name: (await pool.score("walled_rewards:the_environment", given(name))).score for name in names}

    named = ("JUDGE_API_KEY",)
    found = with_pool(body, environment=named)
    assert found == {"PATH": 1.0, "MY_SETTING": 0.0, "JUDGE_API_KEY": 1.0, "OTHER_API_KEY": 0.0}


def test_limits_of_memory_and_of_core_dumps_hold_inside(desk: Path):
    found = with_pool(lambda pool: pool.score("walled_rewards:limits", given()), memory_bytes=1 << 30)
    assert found.parts == {"data": 1 << 30, "core": 1}


def test_modules_are_looked_up_within_the_walls_before_the_run(desk: Path):
    (desk / "nosy.py").write_text("open('seen', 'w').close()\ndef score(given):\n    return 1.0\n")
    inside = Surroundings(walls=look_for_walls(["nosy:score", "walled_rewards:honest"]))
    check_functions({"data.reward": WeightedReward(function="walled_rewards:honest")}, inside)
    with pytest.raises(
        ConfigError, match=r"^data\.reward: .*nosy cannot be imported: OSError: .*Read-only file system"
    ):
        check_functions({"data.reward": WeightedReward(function="nosy:score")}, inside)
    assert not (desk / "seen").exists()


def test_a_machine_without_bubblewrap_or_on_which_it_cannot_work_is_one_line(desk: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^rewards\.sandbox: bwrap is missing: apt-get install bubblewrap, or leave"):
        look_for_walls(["walled_rewards:any"], bwrap="no-such-bwrap")
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    inside = Surroundings(walls=look_for_walls(["walled_rewards:any"], bwrap=str(broken)))
    with pytest.raises(ConfigError, match=r"^rewards\.sandbox: no sandbox can be started: bwrap: No permissions to cr"):
        check_functions({"data.reward": WeightedReward(function="walled_rewards:honest")}, inside)


def test_a_module_in_a_folder_that_processes_have_their_own_of_is_refused(monkeypatch: pytest.MonkeyPatch):
    module = Path(f"/tmp/mine_{os.getpid()}.py")
    module.write_text("def score(given):\n    return 1.0\n")
    monkeypatch.chdir("/tmp")
    try:
        with pytest.raises(ConfigError, match=r"is in /tmp, expected a folder of its own for the module"):
            look_for_walls([f"{module.stem}:score"])
    finally:
        module.unlink()


def test_links_on_the_way_to_a_module_lead_there_inside_too(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = tmp_path / "real" / "folder"
    real.mkdir(parents=True)
    (real / "linked.py").write_text("import beside\ndef score(given):\n    return beside.VALUE\n")
    (real / "beside.py").write_text("VALUE = 4.0\n")
    (tmp_path / "first").symlink_to("second")
    (tmp_path / "second").symlink_to(tmp_path / "real")
    monkeypatch.syspath_prepend(str(tmp_path / "first" / "folder"))
    found = with_pool(lambda pool: pool.score("linked:score", given()), walls=look_for_walls(["linked:score"]))
    assert found.score == 4.0
