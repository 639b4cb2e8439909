"""Notices of clouds and clusters: their documented answers, read as moments; and nonsense, which is none."""

import asyncio
from datetime import UTC, datetime

import pytest

from polyrl.cli import worker
from polyrl.errors import UserError
from polyrl.wire.frames import MAX_NOTICE_S
from polyrl.worker.spot import answers
from polyrl.worker.spot.answers import Notice
from polyrl.worker.spot.listening import noticing

NOW = datetime(2026, 1, 2, 3, 4, 0, tzinfo=UTC).timestamp()
PREEMPT = (
    b'{"DocumentIncarnation":1,"Events":[{"EventId":"f0","EventType":"Preempt","ResourceType":"VirtualMachine",'
    b'"Resources":["gpu-1"],"EventStatus":"Scheduled","NotBefore":"Fri, 02 Jan 2026 03:04:30 GMT","Description":"",'
    b'"EventSource":"Platform","DurationInSeconds":-1}]}'
)


@pytest.mark.parametrize(
    ("body", "left_s"),
    [
        (b'{"action": "terminate", "time": "2026-01-02T03:06:00Z"}', 120.0),
        (b'{"action": "stop", "time": "2026-01-02T03:06:00Z"}', 120.0),
        (b'{"action": "terminate", "time": "2020-01-02T03:06:00Z"}', 0.0),
        (b'{"action": "terminate", "time": "9999-01-02T03:06:00Z"}', MAX_NOTICE_S),
        (b'{"action": "keep", "time": "2026-01-02T03:06:00Z"}', None),
        (b'{"action": "terminate", "time": "soon"}', None),
        (b'{"action": "terminate"}', None),
        (b"[" * 5000, None),
        (b"", None),
    ],
)
def test_an_action_of_aws_is_a_moment(body: bytes, left_s: float | None):
    found = answers.aws_action(body, NOW)
    assert (None if found is None else found.left_s) == left_s


def test_google_says_true_and_terminates():
    assert answers.gcp_preempted(b"TRUE\n") == Notice("Google Cloud: preempted", 30.0)
    assert answers.gcp_preempted(b"FALSE") is None
    assert answers.gcp_maintenance(b"MIGRATE_ON_HOST_MAINTENANCE") is None
    assert answers.gcp_maintenance(b"NONE") is None
    assert answers.gcp_maintenance(b"TERMINATE_ON_HOST_MAINTENANCE") is not None


@pytest.mark.parametrize(
    ("body", "name", "left_s"),
    [
        (PREEMPT, "gpu-1", 30.0),
        (PREEMPT, "", 30.0),
        (PREEMPT, "gpu-2", None),
        (PREEMPT.replace(b"Preempt", b"Freeze"), "gpu-1", None),
        (PREEMPT.replace(b"Scheduled", b"Started"), "gpu-1", 0.0),
        (PREEMPT.replace(b"Fri, 02 Jan 2026 03:04:30 GMT", b""), "gpu-1", 30.0),
        (b'{"DocumentIncarnation":2,"Events":[]}', "gpu-1", None),
        (b'{"Events":{"a":1}}', "gpu-1", None),
    ],
)
def test_an_event_of_azure_counts_if_it_takes_this_machine(body: bytes, name: str, left_s: float | None):
    found = answers.azure_events(body, name, NOW)
    assert (None if found is None else found.left_s) == left_s


def test_auto_believes_the_machine_alone():
    assert answers.places("auto", {}, "") == ()
    assert answers.places("auto", {}, "Amazon EC2 p5.48xlarge") == ("aws",)
    assert answers.places("auto", {}, "Microsoft Corporation Virtual Machine") == ()
    assert answers.places("auto", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Google Google Compute Engine") == (
        "gcp",
        "kubernetes",
    )
    assert answers.places("auto", {"SLURM_JOB_ID": "7"}, "") == ("slurm",)
    assert answers.places("none", {"SLURM_JOB_ID": "7"}, "Google") == ()
    for choice in worker.SPOT_CHOICES[1:-1]:
        assert answers.places(choice, {}, "") == (choice,)


@pytest.mark.parametrize(
    ("place", "environment", "left_s"),
    [
        ("kubernetes", {"POLYRL_GRACE_S": "120"}, 120.0),
        ("kubernetes", {}, 30.0),
        ("kubernetes", {"POLYRL_GRACE_S": "-1"}, 30.0),
        ("kubernetes", {"POLYRL_GRACE_S": "999999999999"}, MAX_NOTICE_S),
        ("slurm", {"SLURM_JOB_END_TIME": str(int(NOW) + 60)}, 60.0),
        ("slurm", {"SLURM_JOB_END_TIME": str(int(NOW) + 9000)}, 0.0),
        ("slurm", {"SLURM_JOB_END_TIME": "9" * 400}, 0.0),
        ("slurm", {}, 0.0),
    ],
)
def test_a_signal_leaves_the_time_that_its_sender_gives(place, environment: dict[str, str], left_s: float):
    assert answers.signalled((place,), environment, NOW).left_s == left_s


NONSENSE = [
    b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    b'{"action": "terminate", "time": "\xff"}',
    b'{"Events": [{"EventType": "\xff\xfe"}]}',
]


@pytest.mark.parametrize("body", NONSENSE, ids=["deep", "no text", "no text inside"])
def test_what_no_reader_survives_is_no_notice(body: bytes):
    assert answers.aws_action(body, NOW) is None
    assert answers.azure_events(body, "", NOW) is None


@pytest.mark.parametrize(
    "moment", ["Mon, 19 Sep 99999999999999999999 18:29:47 GMT", "Mon, 19 Sep 2016 18:29:47 +" + "9" * 30]
)
def test_an_event_of_azure_without_a_moment_of_this_world_leaves_what_azure_promises(moment: str):
    body = PREEMPT.replace(b"Fri, 02 Jan 2026 03:04:30 GMT", moment.encode())
    assert answers.azure_events(body, "gpu-1", NOW) == Notice("Azure: Preempt", answers.AZURE_PREEMPTION_S)


def test_a_metadata_address_that_is_none_is_one_line_before_anything_is_watched(monkeypatch: pytest.MonkeyPatch):
    async def body() -> None:
        async with noticing("aws", 0.0, lambda why, left_s: None):
            raise AssertionError("it is watched")

    monkeypatch.setenv("POLYRL_METADATA_URL", "ftp://x")
    with pytest.raises(UserError, match="POLYRL_METADATA_URL: 'ftp://x'; expected an address"):
        asyncio.run(body())
