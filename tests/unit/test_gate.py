"""When drafts are verified: where it pays, and never at a loss of more than 2%, however badly it turns out."""

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from polyrl.engines.builtin.config import MAX_DRAFT
from polyrl.engines.builtin.drafting import Draft
from polyrl.engines.builtin.gate import MAX_SAMPLES, ROWS, Gate

H200_MS = {1: (1.86, {2: 2.1, 4: 2.1, 8: 2.2}), 16: (2.09, {2: 2.5, 4: 2.7, 8: 3.3})}
"""A decoding step as measured (docs/results/builtin-engine.md), and rounds as they may be: of 1 and 16 samples."""


class World(NamedTuple):
    """Times in seconds, and how many tokens of a draft are right, by the tokens drawn so far."""

    num_samples: int
    decoding_s: Callable[[], float]
    round_s: Callable[[int], float]
    num_right: Callable[[float], int]
    has_draft: Callable[[], bool] = lambda: True


class Played(NamedTuple):
    seconds: float
    plain_s: float
    num_rounds: int
    num_accepted: int


def play(world: World, num_tokens: int, gate: Gate | None = None) -> Played:
    """Generate so many tokens of each sample as the engine does: bursts of 64 steps, or of rounds up to 64 tokens."""
    gate = Gate() if gate is None else gate
    num = world.num_samples
    done, num_rounds, num_accepted = 0.0, 0, 0
    seconds = plain_s = 0.0

    def draft() -> Draft:
        return Draft([1] * MAX_DRAFT, 8) if world.has_draft() else Draft([], 0)

    while done < num_tokens:
        if not gate.should_begin(num):
            steps = [world.decoding_s() for _ in range(64)]
            gate.decoded(num, 64, sum(steps))
            its = draft()
            gate.saw(its, world.num_right(done) if its.tokens else 0)
            done, seconds, plain_s = done + 64, seconds + sum(steps), plain_s + sum(steps)
            continue
        until = done + 64
        while True:
            drafts = [draft() for _ in range(num)]
            rows = gate.rows(drafts)
            right = [min(rows - 1, world.num_right(done)) if one.tokens else 0 for one in drafts]
            for one, its in zip(drafts, right, strict=True):
                gate.saw(one._replace(tokens=one.tokens[: rows - 1]), its)
            took = world.round_s(rows)
            gate.verified(num, rows, num + sum(right), took)
            advance = 1 + sum(right) / num
            done, seconds = done + advance, seconds + took
            plain_s += advance * world.decoding_s()
            num_rounds, num_accepted = num_rounds + 1, num_accepted + sum(right)
            if done >= until or not gate.should_go_on(num):
                break
    return Played(seconds, plain_s, num_rounds, num_accepted)


def world(num: int, num_right: Callable[[float], int], noise: float = 0.0, seed: int = 1, **more) -> World:
    draw = random.Random(seed)
    step_ms, rounds_ms = H200_MS[num]

    def noisy(ms: float) -> float:
        return ms / 1e3 * (1 + noise * draw.uniform(-1, 1))

    return World(num, lambda: noisy(step_ms), lambda rows: noisy(rounds_ms[rows]), num_right, **more)


@pytest.mark.parametrize("num", [1, 16])
def test_drafts_that_are_right_make_it_faster(num):
    played = play(world(num, lambda _: 6), 20_000)
    assert played.seconds < played.plain_s / 2
    assert played.num_accepted > 10_000 * num


@pytest.mark.parametrize("num", [1, 16])
def test_drafts_that_are_wrong_are_not_verified(num):
    played = play(world(num, lambda _: 0), 20_000)
    assert played.num_rounds == 0
    assert played.seconds == played.plain_s


ADVERSE: dict[str, Callable[[float], int]] = {
    "right until it begins": lambda done: 7 if done < 700 else 0,
    "right and wrong in turn": lambda done: 7 if int(done / 500) % 2 else 0,
    "right and wrong by the burst": lambda done: 7 if int(done / 64) % 2 else 0,
    "barely right": lambda done: int(done) % 7 == 0,
    "seldom, and then all": lambda done: 7 if int(done) % 40 == 0 else 0,
}


@pytest.mark.parametrize("slow", [1.0, 1.5, 3.0], ids=lambda one: f"rounds x {one}")
@pytest.mark.parametrize("how", ADVERSE)
@pytest.mark.parametrize("num", [1, 16])
def test_it_is_never_slower_by_more_than_2_percent(num, how, slow):
    its = world(num, ADVERSE[how], noise=0.05)
    its = its._replace(round_s=lambda rows, then=its.round_s: slow * then(rows))
    played = play(its, 30_000)
    assert played.seconds <= 1.02 * played.plain_s


def test_it_is_never_slower_by_more_than_2_percent_where_drafts_only_seem_right_while_it_decodes():
    """What was watched says that all is right; nothing that is verified is."""
    gate = Gate()
    its = world(1, lambda _: 0)
    seconds = plain_s = 0.0
    for _ in range(600):
        if gate.should_begin(1):
            while True:
                rows = gate.rows([Draft([1] * 7, 16)])
                took = its.round_s(rows)
                gate.verified(1, rows, 1, took)
                seconds, plain_s = seconds + took, plain_s + its.decoding_s()
                if not gate.should_go_on(1):
                    break
        gate.decoded(1, 64, 64 * its.decoding_s())
        gate.saw(Draft([1] * 7, 16), 7)
        seconds, plain_s = seconds + 64 * its.decoding_s(), plain_s + 64 * its.decoding_s()
    assert plain_s < seconds <= 1.02 * plain_s, "it was tried, and given up in time"


def test_no_more_than_a_small_share_of_time_goes_into_drafts_that_are_only_compared():
    gate = Gate()
    for _ in range(20):
        gate.decoded(1, 64, 0.128)
        gate.saw(Draft([1] * 7, 16), 7)
    assert gate.may_watch()
    gate.watched(0.02)
    assert not gate.may_watch()
    assert gate.should_begin(1), "what was seen still counts"
    for _ in range(12):
        gate.decoded(1, 64, 0.128)
    assert gate.may_watch()


def test_time_for_the_texts_of_rounds_is_booked_as_lost():
    gate = Gate()
    for _ in range(20):
        gate.decoded(1, 64, 0.128)
        gate.saw(Draft([1] * 7, 16), 7)
    gate.prepared(0.0128)
    assert gate.should_begin(1)
    gate.prepared(0.02)
    assert not gate.should_begin(1)
    for _ in range(10):
        gate.decoded(1, 64, 0.128)
    assert gate.should_begin(1)


def test_what_was_compiled_in_a_first_burst_is_not_taken_for_slow_decoding():
    gate = Gate()
    gate.decoded(1, 64, 20.0)
    for _ in range(8):
        gate.saw(Draft([], 0), 0)
        gate.decoded(1, 64, 0.128)
    gate.verified(1, 2, 1, 0.003)
    assert gate.lost_s == pytest.approx(0.001, rel=0.01)


def test_decoding_is_measured_again_now_and_then():
    gate = Gate()
    for _ in range(20):
        gate.decoded(1, 64, 0.128)
        gate.saw(Draft([1] * 7, 16), 7)
    begun = 0
    while gate.should_begin(1):
        gate.verified(1, 8, 8, 0.002)
        begun += 1
    assert 8 < begun < 100
    gate.decoded(1, 64, 0.128)
    assert gate.should_begin(1)


def test_many_samples_are_left_to_decode():
    assert not Gate(always=True).should_begin(MAX_SAMPLES + 1)
    assert Gate(always=True).should_begin(MAX_SAMPLES)


def test_the_number_of_rows_follows_what_they_bring_and_cost():
    gate = Gate()
    for _ in range(50):
        gate.saw(Draft([1] * 7, 16), 7)
        gate.saw(Draft([1] * 7, 3), 0)
    gate.decoded(1, 1, 0.002)
    gate.decoded(1, 1, 0.002)
    assert gate.rows([Draft([1] * 7, 16)]) == 8
    assert gate.rows([Draft([1] * 7, 3)]) == gate.rows([Draft([], 0)]) == 2
    assert gate.rows([Draft([1] * 3, 16)]) == 4, "more rows than tokens bring nothing"
    for _ in range(9):
        gate.verified(1, 8, 8, 0.1)
    assert gate.rows([Draft([1] * 7, 16)]) == 4, "eight were measured to be slow"


def test_the_longest_draft_fills_a_round():
    assert ROWS[-1] - 1 == MAX_DRAFT
