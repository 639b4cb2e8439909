"""`polyrl ledger`: what it prints of simulated and of live runs, and how it ends."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from tests.integration.live import CONFIG, QUICK, Peer, honest_worker, manager, play_round, run, trainer
from tests.properties.hostile import play
from tests.unit.tiny import write_tiny

from polyrl.cli.main import main
from polyrl.journal.files import EVENTS, FILE_NAME, LIVE_FOLDER, JournalWriter
from polyrl.journal.framing import frame
from polyrl.journal.records import encode_header, encode_record
from polyrl.manager.settings import JournalSettings
from polyrl.scheduling.scheduler import Scheduler

PROMPTS_A_STEP = CONFIG.domains[0].prompts_per_step
SAMPLES_A_STEP = PROMPTS_A_STEP * CONFIG.rounds.samples_per_prompt
PRICED = msgspec.structs.replace(CONFIG, trainer_usd_per_hour=3.6)
SMALL_FILES = msgspec.structs.replace(QUICK, journal=JournalSettings(segment_mb=0.002))


def ledger(capsys, *argv):
    code = main(["ledger", *map(str, argv)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def as_json(capsys, *argv):
    code, out, err = ledger(capsys, *argv, "--json")
    return code, json.loads(out), err


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sim")
    assert main(["simulate", str(write_tiny(folder)), "--out", str(folder / "out"), "--no-progress", "--json"]) == 0
    return folder / "out"


# Simulated


def test_a_simulated_run_is_told_and_verified(simulated, capsys):
    code, out, err = ledger(capsys, simulated, "--verify")
    assert (code, err) == (0, "")
    assert out.startswith(f"{simulated}: 4 steps trained in ")
    for words in ("prompts started", "samples started", "tokens arrived", "seconds of", "dollars: $", "verified: "):
        assert words in out


def test_the_object_agrees_with_what_the_simulator_says_of_itself(simulated, capsys):
    code, told, _ = as_json(capsys, simulated)
    result = json.loads((simulated / "result.json").read_text())
    assert code == 0
    assert told["steps"] == result["steps"]
    assert told["tokens"]["arrived"] == result["tokens"]["generated"]
    assert told["tokens"]["kept"] == result["tokens"]["trained"]
    assert told["seconds"] == pytest.approx(result["virtual_s"])
    assert told["usd"]["total"] == pytest.approx(sum(step["usd"] for step in told["usd"]["by_step"]))
    assert told["usd"]["per_step"] == pytest.approx(told["usd"]["total"] / 4)
    assert told["broken_laws"] is None
    assert as_json(capsys, simulated, "--verify")[1]["broken_laws"] == []


def test_a_table_is_never_cut(simulated, capsys):
    _, out, _ = ledger(capsys, simulated)
    assert "…" not in out


# Live


async def two_steps(run_dir: Path, settings=QUICK) -> None:
    """Trains two steps, with a worker that vanishes in mid-answer."""
    async with manager(run_dir, settings) as live, trainer(live, PRICED) as fleet:
        await fleet.publish(0)
        async with Peer(live, "gone") as peer:
            await peer.enter()
            first = asyncio.create_task(play_round(fleet, 0))
            await peer.until_ordered()
            await peer.socket.close()
            async with honest_worker(live):
                await first
                await fleet.publish(1)
                await play_round(fleet, 1)


@pytest.fixture(scope="module")
def live_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("live")
    run(two_steps(run_dir))
    return run_dir


def test_a_live_run_that_ended_is_told_and_verified(live_run, capsys):
    code, told, err = as_json(capsys, live_run, "--verify")
    assert (code, err) == (0, "")
    assert told["broken_laws"] == []
    assert told["steps"] == 2
    assert told["prompts"] == {"started": 4, "trained": 4, "dropped": {}, "deferred": 0, "open": 0}
    assert told["samples"]["trained"] == 2 * SAMPLES_A_STEP
    assert {worker["worker"]: worker["losses"] for worker in told["workers"]}["gone"] == 1
    assert told["usd"]["trainer"] == pytest.approx(told["seconds"] * 0.001)


def test_a_live_run_of_many_files_is_one_run(tmp_path, capsys):
    run(two_steps(tmp_path, SMALL_FILES))
    assert len(list((tmp_path / LIVE_FOLDER).glob(f"{EVENTS}-*.bin"))) > 1
    code, told, err = as_json(capsys, tmp_path, "--verify")
    assert (code, told["steps"], told["broken_laws"], err) == (0, 2, [], "")


async def look_meanwhile(run_dir: Path, codes: list[int]) -> None:
    async with manager(run_dir) as live, honest_worker(live), trainer(live, PRICED) as fleet:
        await fleet.publish(0)
        async for group in fleet.round(0):
            await fleet.settled()
            codes.append(await asyncio.to_thread(main, ["ledger", str(run_dir), "--verify", "--json"]))
            await fleet.take(group)


def test_a_run_that_goes_on_is_told_up_to_now(tmp_path, capsys):
    codes: list[int] = []
    run(look_meanwhile(tmp_path, codes))
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert codes == [0] * PROMPTS_A_STEP
    assert [one["prompts"]["open"] for one in told] == [PROMPTS_A_STEP] * PROMPTS_A_STEP
    assert all(one["broken_laws"] == [] and one["steps"] == 0 for one in told)


def test_the_journal_of_a_killed_manager_is_told_up_to_its_last_whole_record(live_run, tmp_path, capsys):
    journal = next((live_run / LIVE_FOLDER).glob(f"{EVENTS}-*.bin"))
    (tmp_path / LIVE_FOLDER).mkdir()
    (tmp_path / LIVE_FOLDER / journal.name).write_bytes(journal.read_bytes()[:-11])
    code, out, err = ledger(capsys, tmp_path, "--verify")
    assert (code, err) == (0, "")
    assert "the journal ends inside a record, as a killed run leaves it" in out
    assert "verified: " in out


# Bad input


def test_what_is_no_run_is_one_line_and_exit_code_2(tmp_path, simulated, capsys):
    empty, other, damaged = tmp_path / "empty", tmp_path / "other.bin", tmp_path / "damaged.bin"
    empty.mkdir()
    other.write_bytes(b"[run]\nsteps = 3\n")
    whole = (simulated / FILE_NAME).read_bytes()
    damaged.write_bytes(whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:])
    cases = (
        (empty, "there is no run"),
        (other, "not a journal"),
        (damaged, "checksum"),
        (tmp_path / "x", "no such file"),
    )
    for path, why in cases:
        code, out, err = ledger(capsys, path)
        assert (code, out) == (2, "")
        assert err.startswith(f"polyrl: error: {path}")
        assert why in err
        assert err.count("\n") == 1


def test_a_manager_without_a_run_says_so(tmp_path, capsys):
    async def start() -> None:
        async with manager(tmp_path):
            pass

    run(start())
    code, out, err = ledger(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert "no trainer has opened a run" in err


def test_a_journal_of_a_version_that_decides_otherwise_is_told_up_to_there_with_exit_code_1(tmp_path, capsys):
    world = play(4, num_events=60)
    number = next(n for n, entry in enumerate(world.log) if entry[2])
    now, event, commands = world.log[number]
    with JournalWriter(tmp_path / FILE_NAME, world.config) as writer:
        for entry in [*world.log[:number], (now, event, commands[:-1]), *world.log[number + 1 :]]:
            writer.append(*entry)
    code, told, err = as_json(capsys, tmp_path, "--verify")
    assert code == 1
    assert err.startswith(f"polyrl: difference: {tmp_path / FILE_NAME}: record {number + 1}: ")
    assert err.count("\n") == 1
    assert (told["records"], told["broken_laws"]) == (number + 1, [])
    assert "decides otherwise" in told["difference"]


def test_a_broken_law_is_named_and_exit_code_1(tmp_path, capsys):
    world = play(4, num_events=60)
    scheduler = Scheduler(world.config)
    for now, event, _ in world.log[:40]:
        scheduler.handle(event, now)
    scheduler.ledger.tokens_arrived += 5
    records = b"".join(encode_record(*entry) for entry in world.log[40:])
    (tmp_path / FILE_NAME).write_bytes(encode_header(world.config, {}, scheduler.save()) + records)
    code, told, err = as_json(capsys, tmp_path, "--verify")
    assert code == 1
    assert err.startswith("polyrl: broken law: ")
    assert "tokens arrived" in err
    assert err.count("\n") == 1
    assert len(told["broken_laws"]) == 1


def test_a_run_without_events_and_without_prices_is_told(tmp_path, capsys):
    with JournalWriter(tmp_path / FILE_NAME, CONFIG):
        pass
    code, out, err = ledger(capsys, tmp_path, "--verify")
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path}: 0 steps trained in 0.0 s; rounds opened: none")
    assert "dollars: none; all prices are 0" in out


EVIL = "\x1b]0;title\x07\u202e"


def test_words_of_a_strangers_journal_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    header = encode_header(CONFIG, {"caveat": EVIL})
    unknown = frame(msgspec.msgpack.encode([0.0, {"event": "WorkerLeft", "worker": EVIL, "cause": EVIL}, bytes(8)]))
    strange = frame(
        msgspec.msgpack.encode([0.0, {"event": "LeaseEnded", "lease": 1, "num_tokens": 1, "reason": EVIL}, bytes(8)])
    )
    for number, data in enumerate((header, header + unknown, header + strange)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / FILE_NAME).write_bytes(data)
        for argv in (["ledger", str(folder)], ["story", str(folder), "1/0"], ["replay", str(folder)]):
            main(argv)
            said = capsys.readouterr()
            assert all(line.isprintable() for line in (said.out + said.err).split("\n")), argv
