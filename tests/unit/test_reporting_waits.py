"""A wait that does not end by itself is told once, when it has lasted a while, and once more when it is over."""

from polyrl.run.findings import Finding
from polyrl.run.reporting import Waiting

NOBODY = Finding("12 samples wait, and there is no worker", "they wait", "have a worker join", needs_help=True)
MOVES = Finding("the last sample runs", "it ends by itself")
LINE = "waits: 12 samples wait, and there is no worker; `polyrl doctor runs/tiny` says what to do"


def said(*looks: tuple[float, Finding]) -> dict[float, str]:
    waiting = Waiting("polyrl doctor runs/tiny")
    lines = {now: waiting.look(finding, now) for now, finding in looks}
    return {now: line for now, line in lines.items() if line is not None}


def test_a_wait_is_told_once_and_so_is_its_end():
    looks = [(0.0, NOBODY), (14.0, NOBODY), (15.0, NOBODY), (30.0, NOBODY), (600.0, NOBODY), (603.0, MOVES)]
    assert said(*looks, (606.0, MOVES)) == {15.0: LINE, 603.0: "goes on, after 10 min"}


def test_a_short_wait_is_no_news():
    assert said((0.0, NOBODY), (14.0, MOVES), (15.0, NOBODY), (29.0, NOBODY), (30.0, MOVES)) == {}


def test_the_next_wait_is_told_again():
    looks = [(0.0, NOBODY), (20.0, NOBODY), (40.0, MOVES), (50.0, NOBODY), (70.0, NOBODY)]
    assert said(*looks) == {20.0: LINE, 40.0: "goes on, after 40.0 s", 70.0: LINE}


def test_rewards_that_take_long_are_told_of_though_they_end_by_themselves():
    slow = Finding("2 answers are being scored", "they end", stalls=True)
    line = "waits: 2 answers are being scored; `polyrl doctor runs/tiny` says more"
    assert said((0.0, slow), (14.0, slow), (15.0, slow), (20.0, MOVES)) == {15.0: line, 20.0: "goes on, after 20.0 s"}


def test_whatever_stands_still_for_long_is_told_of():
    waiting = Waiting("polyrl doctor runs/tiny")
    told = [waiting.look(MOVES, now, is_moving=False) for now in (0.0, 14.0, 15.0, 30.0)]
    assert told == [None, None, "waits: the last sample runs; `polyrl doctor runs/tiny` says more", None]
    assert waiting.look(MOVES, 40.0) == "goes on, after 40.0 s"


def test_what_ends_by_itself_is_no_news():
    assert said((0.0, MOVES), (1000.0, MOVES)) == {}
