"""The journal's bytes: what was written is read back, and whatever happened to the bytes since is noticed."""

import gzip
import itertools
import os
import struct
import subprocess
import sys
import time
import zlib
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.hostile import HostileWorld, play

from polyrl.errors import JournalError, UserError
from polyrl.ids import Step, Version
from polyrl.journal.files import FILE_NAME, JournalWriter, open_journal, open_journals
from polyrl.journal.framing import CutShort
from polyrl.journal.records import (
    JournalDigest,
    encode_header,
    encode_record,
    read_records,
    replay,
    resume_scheduler,
)
from polyrl.scheduling.core.desk import RULES
from polyrl.scheduling.core.events import RoundRequested, TimePassed, VersionPublished
from polyrl.scheduling.core.parameters import DomainData, SchedulerConfig
from polyrl.scheduling.invariants import check
from polyrl.scheduling.scheduler import Scheduler

CONFIG = SchedulerConfig(domains=(DomainData(name="math", prompts_per_step=2, num_prompts=10),))
ABOUT = {"scenario": "hostile"}
OLD_RUN = Path(__file__).parent / "recorded" / "run-of-rules-0"
SEEDS = st.integers(0, 11)


@lru_cache(maxsize=16)
def world(seed: int) -> HostileWorld:
    return play(seed, num_events=60)


@lru_cache(maxsize=16)
def journal(seed: int) -> bytes:
    return b"".join(pieces(seed))


def pieces(seed: int) -> list[bytes]:
    played = world(seed)
    return [encode_header(played.config, ABOUT), *(encode_record(*entry) for entry in played.log)]


def read_and_replay(data: bytes):
    header, records = read_records(data, "a journal")
    return replay([(header, records)])


def frame(payload: bytes) -> bytes:
    length = struct.pack("<I", len(payload))
    return length + struct.pack("<II", zlib.crc32(length), zlib.crc32(payload)) + payload


# Round trips


@given(SEEDS)
@settings(max_examples=12)
def test_a_hostile_history_is_read_back_as_it_was_and_replays_to_the_same_commands(seed):
    header, records = read_records(journal(seed), "a journal")
    kept = list(records)
    assert (header.config, header.about) == (world(seed).config, ABOUT)
    # By their text: a hostile machine says NaN, which no equality holds for.
    told = [repr((now, event)) for now, event, _ in world(seed).log]
    assert [repr((record.now, record.event)) for record in kept] == told
    assert [record.number for record in kept] == list(range(1, len(kept) + 1))
    report = replay([(header, kept)])
    assert report.first_difference is None
    assert report.num_records == len(kept)


@given(SEEDS, st.integers(1, 300))
@settings(max_examples=12)
def test_it_does_not_matter_how_the_bytes_come_in(seed, chunk_bytes):
    data = journal(seed)
    chunks = [data[first : first + chunk_bytes] for first in range(0, len(data), chunk_bytes)]
    in_chunks, at_once = read_records(chunks, "a journal")[1], read_records(data, "a journal")[1]
    assert [record.payload for record in in_chunks] == [record.payload for record in at_once]


def test_a_record_is_found_at_its_offset():
    data = journal(0)
    for record in read_records(data, "a journal")[1]:
        assert data[record.offset :].startswith(frame(record.payload))


def test_the_digest_is_of_all_records_and_of_nothing_else():
    written = JournalDigest()
    for piece in pieces(3)[1:]:
        written.add_encoded(piece)
    same_run_elsewhere = encode_header(world(3).config, {"host": "another"}) + b"".join(pieces(3)[1:])
    assert read_and_replay(journal(3)).digest == read_and_replay(same_run_elsewhere).digest == written.hex()
    assert read_and_replay(b"".join(pieces(3)[:-1])).digest != written.hex()


def test_the_digest_is_the_same_under_another_hash_seed():
    program = (
        "from tests.properties.hostile import play\n"
        "from polyrl.journal.records import JournalDigest, encode_record\n"
        "digest = JournalDigest()\n"
        "for entry in play(5, num_events=60).log: digest.add_encoded(encode_record(*entry))\n"
        "print(digest.hex())"
    )
    root = Path(__file__).parents[2]
    digests = {read_and_replay(journal(5)).digest}
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
        command = [sys.executable, "-c", program]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        digests.add(ran.stdout.strip())
    assert len(digests) == 1


# Damage


@given(st.data())
@settings(max_examples=150)
def test_any_flipped_bit_is_an_error_of_one_line_that_names_the_journal(data):
    seed = data.draw(SEEDS)
    damaged = bytearray(journal(seed))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(JournalError) as caught:
        read_and_replay(bytes(damaged))
    assert str(caught.value).startswith("a journal: ")
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_behind_the_header_is_damage_and_never_a_cut():
    data = journal(1)
    first = next(read_records(data, "a journal")[1])
    for bit in range(8 * (12 + len(first.payload))):
        damaged = bytearray(data)
        damaged[first.offset + bit // 8] ^= 1 << bit % 8
        with pytest.raises(JournalError, match=f"record 1 at byte {first.offset}: .*checksum") as caught:
            read_and_replay(bytes(damaged))
        assert not isinstance(caught.value, CutShort)


@given(st.data())
@settings(max_examples=100)
def test_a_journal_that_ends_early_is_whole_between_records_and_cut_short_elsewhere(data):
    seed = data.draw(SEEDS)
    whole = journal(seed)
    end = data.draw(st.integers(1, len(whole) - 1))
    ends = [len(encode_header(world(seed).config, ABOUT))]
    for piece in pieces(seed)[1:]:
        ends.append(ends[-1] + len(piece))
    num_whole = sum(one <= end for one in ends[1:])
    if end in ends:
        assert read_and_replay(whole[:end]).num_records == num_whole
        return
    with pytest.raises(CutShort, match="cut short") as caught:
        read_and_replay(whole[:end])
    if end > ends[0]:
        assert f"record {num_whole + 1} at byte {ends[num_whole]}" in str(caught.value)
        assert caught.value.offset == ends[num_whole]
        assert read_and_replay(whole[: caught.value.offset]).num_records == num_whole


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\n", b"\x00" * 4096, b"polyrl-journal x\n", b"polyrl-journal \n", b"x" * 99]
)
def test_what_is_no_journal_is_called_that(data):
    with pytest.raises(JournalError, match="a journal: not a journal"):
        read_records(data, "a journal")


def test_a_newer_format_is_named():
    with pytest.raises(JournalError, match="format 2; this version of PolyRL reads format 1"):
        read_records(b"polyrl-journal 2\n whatever it holds", "a journal")


def test_zeros_behind_the_last_record_are_damage():
    with pytest.raises(JournalError, match="checksum of its length"):
        read_and_replay(journal(0) + b"\x00" * 64)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ([1.0, {"event": "WorkerSang", "worker": "w1"}, b"12345678"], "unknown event 'WorkerSang'"),
        ([1.0, {"event": "RoundRequested"}, b"12345678"], "not a record: .*step"),
        ([1.0, {"event": "TimePassed"}, b"1"], "not a record: a digest of 1 bytes"),
        ([float("nan"), {"event": "TimePassed"}, b"12345678"], "time goes from"),
        ([float("inf"), {"event": "TimePassed"}, b"12345678"], "time goes from"),
        (["soon"], "not a record"),
        (17, "not a record"),
    ],
)
def test_a_whole_record_that_makes_no_sense_is_refused(payload, why):
    data = encode_header(CONFIG) + frame(msgspec.msgpack.encode(payload))
    with pytest.raises(JournalError, match=f"record 1 at byte .*{why}"):
        read_and_replay(data)


def test_time_that_goes_back_is_refused():
    data = encode_header(CONFIG) + encode_record(2.0, TimePassed(), []) + encode_record(1.0, TimePassed(), [])
    with pytest.raises(JournalError, match=r"record 2 .*time goes from 2\.0 to 1\.0"):
        read_and_replay(data)


def test_a_header_with_an_impossible_configuration_is_refused():
    payload = msgspec.to_builtins(CONFIG)
    payload["max_new_tokens"] = 0
    data = b"polyrl-journal 1\n" + frame(msgspec.msgpack.encode([payload, {}]))
    with pytest.raises(JournalError, match=r"header at byte 17: .*max_new_tokens"):
        read_records(data, "a journal")


# Differences


def test_the_first_other_command_is_found_and_named():
    scheduler = Scheduler(CONFIG)
    first = scheduler.handle(VersionPublished(Version(0)), 0.0)
    second = scheduler.handle(RoundRequested(Step(0)), 1.0)
    data = (
        encode_header(CONFIG)
        + encode_record(0.0, VersionPublished(Version(0)), first)
        + encode_record(1.0, RoundRequested(Step(0)), second[:-1])
        + encode_record(2.0, TimePassed(), [])
    )
    report = read_and_replay(data)
    assert report.num_records == 2
    difference = report.first_difference
    assert difference is not None
    assert (difference.record, difference.now, difference.event) == (2, 1.0, RoundRequested(Step(0)))
    assert difference.expected != difference.got
    assert list(difference.commands) == second


@given(st.data())
@settings(max_examples=30)
def test_another_configuration_gives_a_difference(data):
    seed = data.draw(SEEDS)
    config = world(seed).config
    rounds = msgspec.structs.replace(config.rounds, samples_per_prompt=config.rounds.samples_per_prompt + 1)
    other = encode_header(msgspec.structs.replace(config, rounds=rounds))
    assert read_and_replay(other + b"".join(pieces(seed)[1:])).first_difference is not None


# Files


def test_a_written_file_is_read_back_with_the_writers_digest(tmp_path):
    played = world(2)
    with JournalWriter(tmp_path / FILE_NAME, played.config, ABOUT) as writer:
        for entry in played.log:
            writer.append(*entry)
    for path in (tmp_path, tmp_path / FILE_NAME, str(tmp_path)):
        header, records = next(open_journals(path))
        report = replay([(header, records)])
        assert header.about == ABOUT
        assert (report.num_records, report.digest) == (writer.num_records, writer.digest)
        assert report.first_difference is None


def test_what_was_flushed_is_there_before_the_end(tmp_path):
    writer = JournalWriter(tmp_path / FILE_NAME, CONFIG)
    writer.append(1.0, TimePassed(), [])
    writer.flush()
    assert [record.event for record in next(open_journals(tmp_path))[1]] == [TimePassed()]
    writer.close()


def test_a_journal_is_never_written_over(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_bytes(b"dear to somebody")
    with pytest.raises(UserError, match="exists already"):
        JournalWriter(path, CONFIG)
    assert path.read_bytes() == b"dear to somebody"


def test_a_place_that_cannot_be_written_is_the_persons_error(tmp_path):
    with pytest.raises(UserError, match="cannot write a journal there: No such file or directory"):
        JournalWriter(tmp_path / "missing" / FILE_NAME, CONFIG)


def test_a_missing_file_and_a_directory_without_one_are_named(tmp_path):
    with pytest.raises(JournalError, match=r"nothing\.bin: there is no such file"):
        open_journal(tmp_path / "nothing.bin")
    with pytest.raises(JournalError, match=r"there is no run; expected journal\.bin of a simulation"):
        next(open_journals(tmp_path))


# Several journals in a row


def segments(seed: int, cut: int) -> list[bytes]:
    """A history in two journals, the second from the state that the first ended with."""
    played = world(seed)
    scheduler = Scheduler(played.config)
    parts = [encode_header(played.config)], []
    for number, (now, event, commands) in enumerate(played.log):
        if number == cut:
            parts[1].append(encode_header(played.config, None, scheduler.save()))
        scheduler.handle(event, now)
        parts[number >= cut].append(encode_record(now, event, commands))
    return [b"".join(part) for part in parts]


def test_a_run_in_two_journals_replays_like_one_and_the_second_alone_replays_too():
    first, second = (read_records(data, "part") for data in segments(0, 80))
    assert replay([first, second]).first_difference is None
    assert replay([read_records(segments(0, 80)[1], "part")]).first_difference is None


def test_a_journal_that_starts_from_another_state_is_refused():
    first, second = read_records(segments(0, 80)[0], "part"), read_records(segments(0, 90)[1], "part")
    with pytest.raises(JournalError, match="does not start from the state"):
        replay([first, second])


def old_run() -> list[bytes]:
    """Journals of a hostile world, one behind the other, as a version wrote them that knew no rules but its own."""
    return [gzip.decompress(path.read_bytes()) for path in sorted(OLD_RUN.glob("*.gz"))]


def test_a_run_of_an_earlier_version_replays_over_all_of_its_journals_and_from_each():
    journals = old_run()
    report = replay(read_records(one, "an old journal") for one in journals)
    assert report.first_difference is None
    alone = [read_and_replay(one) for one in journals]
    assert [one.first_difference for one in alone] == [None] * 4
    assert report.num_records == sum(one.num_records for one in alone)


def test_a_run_of_an_earlier_version_whose_journals_do_not_belong_together_is_refused():
    first, _, third, _ = old_run()
    with pytest.raises(JournalError, match="does not start from the state"):
        replay(read_records(one, "an old journal") for one in (first, third))


def test_a_run_of_an_earlier_version_goes_on_by_our_rules():
    scheduler = None
    for one in old_run():
        header, records = read_records(one, "an old journal")
        scheduler = resume_scheduler(header, scheduler)
        for record in records:
            scheduler.handle(record.event, record.now)
    assert scheduler is not None and scheduler.rules == 0
    scheduler.adopt(RULES)
    check(scheduler, scheduler.now)
    scheduler.handle(TimePassed(), scheduler.now + 1000.0)
    check(scheduler, scheduler.now)


def test_a_frame_that_claims_to_be_large_takes_no_time_and_one_that_claims_too_much_is_none():
    """Every quarter of a megabyte was copied again with the next: 200 MB took more than a minute."""
    begin = b"polyrl-journal 1\n"

    def head(num_bytes: int) -> bytes:
        length = struct.pack("<I", num_bytes)
        return struct.pack("<III", num_bytes, zlib.crc32(length), 0)

    zeros = itertools.repeat(bytes(1 << 16), 1600)
    began = time.monotonic()
    with pytest.raises(CutShort, match="of its 900000000 bytes are there"):
        read_records(itertools.chain([begin + head(900_000_000)], zeros), "it")
    assert time.monotonic() - began < 5.0
    with pytest.raises(JournalError, match="a length of 4,000,000,000 bytes; expected at most"):
        read_records(begin + head(4_000_000_000), "it")


def test_no_record_comes_after_the_end_of_time():
    begin = encode_header(SchedulerConfig(domains=(DomainData(name="d", prompts_per_step=1, num_prompts=1),)))
    _, records = read_records(begin + encode_record(1e308, TimePassed(), []), "it")
    with pytest.raises(JournalError, match="time goes from -inf to 1e"):
        list(records)
