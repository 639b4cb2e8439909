"""Reward functions of a person: good ones, and every way to go wrong."""

import asyncio
import contextlib
import os
import struct
import subprocess
import sys
import threading
import time

from msgspec import structs

from polyrl.rewards.messages import Failed, RewardScored, encode
from polyrl.rewards.reward import Reward, RewardInput, RewardUnavailable


def length(given: RewardInput) -> float:
    return len(given.answer)


def echo_row(given: RewardInput) -> float:
    return given.row["values"][1] + given.num_tokens


def num_bits(given: RewardInput) -> float:
    within = given.row["within"][0]["list"]
    assert within[2] is True
    return given.row["value"].bit_length() + within[0].bit_length() + within[1]


def is_true(given: RewardInput) -> bool:
    return given.answer == given.expected


def loaded_modules(given: RewardInput) -> float:
    return sum(name in sys.modules for name in ("torch", "transformers", "numpy"))


def own_pid(given: RewardInput) -> float:
    return os.getpid()


def raises(given: RewardInput) -> float:
    raise KeyError("no such thing\nin two lines")


def exits(given: RewardInput) -> float:
    sys.exit(3)


def not_a_number(given: RewardInput) -> float:
    return float("nan")


def a_text(given: RewardInput) -> str:
    return "1.0"


def nothing(given: RewardInput) -> None:
    return None


def sleeps(given: RewardInput) -> float:
    time.sleep(3600)
    return 1.0


def dies(given: RewardInput) -> float:
    os._exit(1)


def prints_a_lot(given: RewardInput) -> float:
    for _ in range(200):
        print("x" * 10_000)
        print("y" * 10_000, file=sys.stderr)
    os.write(1, b"z" * 100_000)
    return 1.0


def forks_and_returns(given: RewardInput) -> float:
    """The child sleeps on; its pid is the reward."""
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    return float(child)


def forks_and_dies(given: RewardInput) -> float:
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    with open(given.row["pid_file"], "w") as file:
        file.write(str(child))
    os._exit(1)


def both_return(given: RewardInput) -> float:
    """The child comes back as well, and would answer for its parent."""
    return 1.0 if os.fork() else 2.0


async def waits(given: RewardInput) -> float:
    await asyncio.sleep(0.01)
    return 0.5


async def waits_for_ever(given: RewardInput) -> float:
    await asyncio.sleep(3600)
    return 1.0


NAP_S = 0.4
_napping: set[asyncio.Task[object] | None] = set()


async def naps(given: RewardInput) -> float:
    """The reward is how many nap at the end."""
    _napping.add(asyncio.current_task())
    await asyncio.sleep(NAP_S)
    num = len(_napping)
    _napping.discard(asyncio.current_task())
    return num


_beats: list[float] = []
_left: set[asyncio.Task[None]] = set()


async def _beat() -> None:
    while True:
        _beats.append(time.monotonic())
        await asyncio.sleep(0.02)


async def leaves_a_task(given: RewardInput) -> float:
    _left.add(asyncio.create_task(_beat()))
    return 1.0


async def beats(given: RewardInput) -> float:
    return len(_beats)


async def async_raises(given: RewardInput) -> float:
    raise TimeoutError("its own")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit(7)


def raises_the_unspeakable(given: RewardInput) -> float:
    raise Unspeakable


async def async_raises_the_unspeakable(given: RewardInput) -> float:
    raise Unspeakable


def too_much(given: RewardInput) -> float:
    return -1e308


def too_much_together(given: RewardInput) -> dict[str, float]:
    return {"a": 6e8, "b": 6e8}


def _forge(reply: RewardScored | Failed) -> None:
    """Say this in place of every reply with a score."""

    def forged(said: RewardScored | Failed) -> bytes:
        return encode(structs.replace(reply, nonce=said.nonce) if isinstance(said, RewardScored) else said)

    vars(sys.modules["__main__"])["encode"] = forged


def forges_a_number(given: RewardInput) -> float:
    _forge(RewardScored(b"", float("inf"), {}))
    return 1.0


def forges_a_reason(given: RewardInput) -> float:
    _forge(Failed(b"", "\x1b[2Ja line\nand another"))
    return 1.0


async def async_text(given: RewardInput) -> str:
    return "good"


async def blocks(given: RewardInput) -> float:
    """What nobody should do in an `async def`, and everybody does."""
    time.sleep(3600)
    return 1.0


async def blocks_if_told(given: RewardInput) -> float:
    await asyncio.sleep(0.05)
    if given.answer == "block":
        time.sleep(3600)
    await asyncio.sleep(0.2)
    return float(len(given.answer))


async def dies_if_told(given: RewardInput) -> float:
    await asyncio.sleep(0.05)
    if given.answer == "die":
        os._exit(7)
    await asyncio.sleep(0.2)
    return float(len(given.answer))


async def async_pid(given: RewardInput) -> float:
    await asyncio.sleep(0.2)
    return float(os.getpid())


def runs_a_loop(given: RewardInput) -> float:
    return asyncio.run(waits(given))


def parts(given: RewardInput) -> dict[str, float]:
    return {"format": 0.25, "length": len(given.answer)}


def score_and_parts(given: RewardInput) -> dict[str, float]:
    return {"score": 7, "format": 0.25}


def a_reward(given: RewardInput) -> Reward:
    return Reward(2.0, {"style": 0.5})


def finds_a_loop(given: RewardInput) -> Reward:
    return Reward(0.25, {"cases": 0.5}, "timed_out", 1.0, False)


def a_text_among_parts(given: RewardInput) -> dict[str, object]:
    return {"format": 1.0, "extracted": "42"}


def too_many_parts(given: RewardInput) -> dict[str, float]:
    return {f"p{number}": 1.0 for number in range(1000)}


def with_arguments(given: RewardInput, *, bonus: float, words: list[str]) -> float:
    return bonus + len(words)


def the_environment(given: RewardInput) -> float:
    return float(given.answer in os.environ)


def needs_a_key(given: RewardInput) -> float:
    return float(len(os.environ["JUDGE_API_KEY"]))


def eats_memory(given: RewardInput) -> float:
    return float(len(bytearray(4 << 30)))


def prints_and_raises(given: RewardInput) -> float:
    print("looking at", given.answer)
    return float(_inner(given))


def _inner(given: RewardInput) -> int:
    return int(given.row["missing"])  # the line that a person wants to see


def prints_and_hangs(given: RewardInput) -> float:
    print("about to hang")
    return sleeps(given)


# What code that a model wrote does when a function runs it in its own process


def writes_everywhere(given: RewardInput) -> float:
    """To every descriptor there is: a whole reply, as it was before questions had nonces, and as it is."""
    for forged in (RewardScored(b"", 777.0, {}), RewardScored(bytes(16), 777.0, {})):
        for number in range(3, 1024):
            with contextlib.suppress(OSError):
                os.write(number, encode(forged))
    return 1.0


def writes_late(given: RewardInput) -> float:
    """A thread that stays, and writes while others are scored."""

    def write() -> None:
        time.sleep(0.1)
        writes_everywhere(given)

    threading.Thread(target=write, daemon=True).start()
    return 1.0


def writes_a_byte(given: RewardInput) -> float:
    for number in range(3, 1024):
        with contextlib.suppress(OSError):
            os.write(number, b"x")
    return 1.0


def announces_gigabytes(given: RewardInput) -> float:
    for number in range(3, 1024):
        with contextlib.suppress(OSError):
            os.write(number, struct.pack("<I", 1_500_000_000) + b"x" * 1000)
            for _ in range(1500):
                os.write(number, bytes(1 << 20))
    return 1.0


def nests_without_end(given: RewardInput) -> float:
    """A reply with a surplus field, which lies in 60,000 lists."""
    body = b"\x98" + encode(RewardScored(b"", 1.0, {}))[5:] + b"\x91" * 60_000 + b"\x01"
    for number in range(3, 1024):
        with contextlib.suppress(OSError):
            os.write(number, struct.pack("<I", len(body)) + body)
    return 1.0


def from_a_fork(given: RewardInput) -> float:
    child = os.fork()
    if child == 0:
        writes_everywhere(given)
        os._exit(0)
    os.waitpid(child, 0)
    return 1.0


def from_a_program(given: RewardInput) -> float:
    program = "import os\nfor number in range(3, 1024):\n try: os.write(number, b'x' * 100)\n except OSError: pass\n"
    subprocess.run([sys.executable, "-c", program], close_fds=False, check=True)
    return 1.0


def closes_everything(given: RewardInput) -> float:
    os.closerange(3, 1024)
    return 1.0


some_value = 3


class Counted:
    """A class whose object counts its answers, and leaves notes of its life in a file."""

    def __init__(self, notes: str, bonus: float = 0.0) -> None:
        self.notes, self.bonus, self.num = notes, bonus, 0
        self._note("made")

    def _note(self, word: str) -> None:
        with open(self.notes, "a") as file:
            file.write(f"{word}\n")

    def start(self) -> None:
        self._note("started")

    def __call__(self, given: RewardInput) -> float:
        self.num += 1
        return self.num + self.bonus

    def close(self) -> None:
        self._note("closed")


class CountedAsync(Counted):
    async def start(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0.05)
        self._note("started")

    async def __call__(self, given: RewardInput) -> float:  # type: ignore[override]
        await asyncio.sleep(0.05)
        self.num += 1
        return self.num + self.bonus

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0.05)
        self._note("closed")


class WithoutStart:
    """Neither start nor close."""

    def __call__(self, given: RewardInput) -> Reward:
        return Reward(0.5, {"style": 1.0}, "crashed", 2.5, False)


class CannotStart:
    def start(self) -> None:
        raise OSError("no such service")

    def __call__(self, given: RewardInput) -> float:
        return 1.0


class NotCallable:
    pass


def infrastructure(given: RewardInput) -> Reward:
    return Reward(outcome="infrastructure_failed")


async def unavailable(given: RewardInput) -> float:
    raise RewardUnavailable("the judge said 503")


def odd_outcome(given: RewardInput) -> Reward:
    return Reward(1.0, outcome="maybe")  # type: ignore[arg-type]


def loops(given: RewardInput) -> float:
    while given.answer == "loop":
        pass
    return 1.0


def burns(given: RewardInput) -> float:
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    return 1.0


class NeverReady:
    def start(self) -> None:
        time.sleep(3600)

    def __call__(self, given: RewardInput) -> float:
        return 1.0
