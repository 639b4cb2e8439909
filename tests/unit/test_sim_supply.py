"""What happens to remote machines, from the scenario's sections."""

from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.config.supply_trace import SupplyEvent, read_supply_trace
from polyrl.errors import ConfigError
from polyrl.ids import WorkerName
from polyrl.sim.scenario import FaultsSection, SimFleetSection, SupplySection
from polyrl.sim.supply import WorldEvent, plan_supply, speed_of

NO_FAULTS = FaultsSection()


def levels(*pairs: tuple[float, int]) -> list[SupplyEvent]:
    return [SupplyEvent(at_s=at_s, workers=workers) for at_s, workers in pairs]


def plan(fleet=None, supply=None, faults=NO_FAULTS, seed=1, horizon_s=10_000.0, **more) -> list[tuple]:
    events = plan_supply(fleet or SimFleetSection(), supply or SupplySection(), faults, seed, horizon_s, **more)
    return [(event.at_s, event.kind, event.worker) for event in events]


def test_the_first_workers_are_there_from_the_start():
    assert plan_supply(SimFleetSection(workers=2), SupplySection(), NO_FAULTS, 1, 100.0) == [
        WorldEvent(0.0, "grant", WorkerName("w1"), 0.0),
        WorldEvent(0.0, "grant", WorkerName("w2"), 0.0),
    ]


def test_zero_workers_and_no_supply_is_an_empty_world():
    assert plan() == []


def test_a_worker_of_the_ramp_joins_at_its_moment_and_is_paid_from_its_start():
    fleet = SimFleetSection(join_at_s=[100.0, 20.0], start_s=60.0)
    assert plan_supply(fleet, SupplySection(), NO_FAULTS, 1, 1000.0) == [
        WorldEvent(0.0, "grant", WorkerName("w1"), 20.0),
        WorldEvent(40.0, "grant", WorkerName("w2"), 100.0),
    ]


def test_a_rise_grants_new_names_and_a_fall_takes_the_newest_with_notice():
    supply = SupplySection(events=levels((100, 3), (500, 1), (900, 2)), notice_s=30.0)
    events = plan_supply(SimFleetSection(workers=1, start_s=60.0), supply, NO_FAULTS, 1, 1000.0)
    assert [(event.at_s, event.kind, event.worker, event.joins_at_s) for event in events] == [
        (0.0, "grant", "w1", 0.0),
        (100.0, "grant", "w2", 160.0),
        (100.0, "grant", "w3", 160.0),
        (470.0, "notice", "w2", None),
        (470.0, "notice", "w3", None),
        (500.0, "take", "w2", None),
        (500.0, "take", "w3", None),
        (900.0, "grant", "w4", 960.0),
    ]


def test_no_notice_is_given_when_there_is_none_and_never_before_the_grant():
    silent = SupplySection(events=levels((50, 0)), notice_s=0.0)
    assert plan(SimFleetSection(workers=1), silent) == [(0.0, "grant", "w1"), (50.0, "take", "w1")]
    hasty = SupplySection(events=levels((10, 1), (20, 0)), notice_s=30.0)
    assert plan(supply=hasty) == [(10.0, "grant", "w1"), (10.0, "notice", "w1"), (20.0, "take", "w1")]


def test_a_trace_is_a_schedule_from_a_file(tmp_path):
    path = tmp_path / "spot.csv"
    path.write_text("at_s,workers\n0,1\n100.5,0\n")
    supply = SupplySection(trace="spot.csv", notice_s=0.0)
    assert plan(supply=supply, trace=read_supply_trace(path)) == [(0.0, "grant", "w1"), (100.5, "take", "w1")]


def test_two_sources_of_supply_are_refused():
    with pytest.raises(ConfigError, match=r"supply\.market_mean_s: supply\.events is set too"):
        plan(supply=SupplySection(events=levels((0, 1)), market_mean_s=60.0))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", ":1: expected the header at_s,workers"),
        ("0,1\n", ":1: expected the header at_s,workers"),
        ("at_s,workers\n", ": has no rows"),
        ("at_s,workers\n0,1\n5\n", ":3: expected 2 values"),
        ("at_s,workers\n0,1\n\nx,2\n", ":4: at_s: 'x' is not a number"),
        ("at_s,workers\n-1,2\n", ":2: at_s: '-1' is out of range"),
        ("at_s,workers\nnan,2\n", ":2: at_s: 'nan' is out of range"),
        ("at_s,workers\n0,1.5\n", ":2: workers: '1.5' is not a number; expected a whole number"),
        ("at_s,workers\n0,-1\n", ":2: workers: '-1' is out of range"),
        ("at_s,workers\n5,1\n4,2\n", ":3: at_s 4 comes before 5"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, text, complaint):
    path = tmp_path / "spot.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_supply_trace(path)
    assert str(caught.value).startswith(f"{path}{complaint}")


def test_a_missing_or_binary_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_supply_trace(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_supply_trace(tmp_path / "binary.csv")


def test_a_random_market_changes_about_as_often_as_it_says_within_its_bounds():
    supply = SupplySection(market_mean_s=100.0, market_min=1, market_max=4, notice_s=0.0)
    events = plan(SimFleetSection(workers=2), supply, horizon_s=100_000.0)
    moments = {at_s for at_s, _, _ in events if at_s > 0}
    assert len(moments) == pytest.approx(1000, rel=0.15)
    held, counts = 0, {}
    for at_s, kind, _ in events:
        held += {"grant": 1, "take": -1}.get(kind, 0)
        counts[at_s] = held
    assert set(counts.values()) == {1, 2, 3, 4}
    assert plan(SimFleetSection(workers=2), supply, seed=2, horizon_s=100_000.0) != events


def test_a_market_with_one_level_stands_still():
    assert plan(supply=SupplySection(market_mean_s=10.0, market_min=0, market_max=0)) == []


def test_deaths_come_at_their_rate_and_end_with_a_restart_under_the_old_name():
    faults = FaultsSection(deaths_per_hour=2.0, restart_s=20.0)
    events = plan(SimFleetSection(workers=10), faults=faults, horizon_s=100 * 3600.0)
    deaths = [event for event in events if event[1] == "die"]
    assert len(deaths) == pytest.approx(2000, rel=0.1)
    for worker in ("w1", "w10"):
        own = [(at_s, kind) for at_s, kind, name in events if name == worker and kind != "grant"]
        for (died, first), (back, second) in zip(own[::2], own[1::2], strict=False):
            assert (first, second, back) == ("die", "restart", pytest.approx(died + 20.0))


def test_a_worker_meets_the_same_fate_however_many_others_there_are():
    faults = FaultsSection(deaths_per_hour=5.0, partitions_per_hour=5.0)
    alone = plan(SimFleetSection(workers=1), faults=faults)
    among = plan(SimFleetSection(workers=7), faults=faults)
    assert [event for event in among if event[2] == "w1"] == alone


def test_the_share_of_slow_workers_is_the_given_one():
    faults = FaultsSection(slow_share=0.25, slow_speed=0.5)
    speeds = [speed_of(WorkerName(f"w{number}"), faults, 1) for number in range(4000)]
    assert set(speeds) == {0.5, 1.0}
    assert fmean(speed == 0.5 for speed in speeds) == pytest.approx(0.25, abs=0.03)
    assert speed_of(WorkerName("w1"), NO_FAULTS, 1) == 1.0


schedules = st.lists(st.tuples(st.floats(0, 900), st.integers(0, 6)), max_size=8).map(sorted)


@given(
    workers=st.integers(0, 4),
    schedule=schedules,
    joins=st.lists(st.floats(0, 900), max_size=3),
    notice_s=st.sampled_from([0.0, 30.0, 200.0]),
    per_hour=st.sampled_from([0.0, 20.0]),
    seed=st.integers(0, 99),
)
def test_a_machine_is_granted_first_taken_last_and_the_level_is_kept(
    workers, schedule, joins, notice_s, per_hour, seed
):
    fleet = SimFleetSection(workers=workers, join_at_s=joins, start_s=60.0)
    supply = SupplySection(events=levels(*schedule), notice_s=notice_s)
    faults = FaultsSection(deaths_per_hour=per_hour, partitions_per_hour=per_hour)
    events = plan_supply(fleet, supply, faults, seed, 1000.0)
    assert events == plan_supply(fleet, supply, faults, seed, 1000.0)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert all(0 <= event.at_s <= 1000.0 for event in events)
    for worker in {event.worker for event in events}:
        own = [event for event in events if event.worker == worker]
        kinds = [event.kind for event in own]
        counts = Counter(kinds)
        assert kinds[0] == "grant" and counts["grant"] == 1
        assert "take" not in kinds[:-1]
        assert counts["notice"] == (counts["take"] if notice_s else 0)
        assert 0 <= counts["die"] - counts["restart"] <= 1
        assert 0 <= counts["cut"] - counts["heal"] <= 1
        joins_at_s = own[0].joins_at_s
        assert joins_at_s is not None
        assert all(event.at_s >= joins_at_s for event in own if event.kind in ("die", "cut"))
    if schedule and not joins:
        held = Counter(event.kind for event in events)
        assert held["grant"] - held["take"] == schedule[-1][1]
