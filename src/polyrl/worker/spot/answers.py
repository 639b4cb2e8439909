"""The notices of clouds and clusters that take a machine away, as moments. Pure: text in, a Notice out.

    aws          spot/instance-action: action and time                  as said, about 120 s
    gcp          instance/preempted TRUE; maintenance-event TERMINATE   30 s; 60 s (their documents)
    azure        scheduled events: Preempt, Terminate, Reboot, ...      until NotBefore; without it 30 s
    kubernetes   SIGTERM                                                terminationGracePeriodSeconds: POLYRL_GRACE_S
    slurm        SIGTERM, SIGUSR1                                       until SLURM_JOB_END_TIME if near; else none

Rules kept here: an answer that cannot be read is no notice, and neither is an action that keeps the machine. A moment
in the past means now; one beyond the bound of the wire is cut to it.
"""

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal, NamedTuple

import msgspec

from polyrl.wire.frames import MAX_NOTICE_S

NoticePlace = Literal["aws", "gcp", "azure", "kubernetes", "slurm"]
CLOUDS: tuple[NoticePlace, ...] = ("aws", "gcp", "azure")
GRACE_VARIABLE = "POLYRL_GRACE_S"
"""Set by our manifests to terminationGracePeriodSeconds, which a pod cannot ask for."""
GCP_PREEMPTION_S = 30.0
GCP_TERMINATION_S = 60.0
AZURE_PREEMPTION_S = 30.0
KUBERNETES_GRACE_S = 30.0
_SLURM_NEAR_S = 660.0
"""A job whose end is nearer than this got its signal for its time limit. Slurm may send it a minute early."""
_AZURE_LEAVES = ("Preempt", "Terminate", "Redeploy", "Reboot")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
"""The chassis tag of every machine of Azure; its vendor alone could be any machine of Microsoft's."""


_UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""All that reading can raise: text that is no UTF-8, years beyond all, lists in lists in lists."""


class Notice(NamedTuple):
    """The machine goes in `left_s` seconds."""

    why: str
    left_s: float


class _AwsAction(msgspec.Struct):
    action: str
    time: str


class _AzureEvent(msgspec.Struct):
    EventType: str = ""
    EventStatus: str = ""
    Resources: list[str] = []
    NotBefore: str = ""


class _AzureEvents(msgspec.Struct):
    Events: list[_AzureEvent] = []


def places(choice: str, environment: Mapping[str, str], firmware: str) -> tuple[NoticePlace, ...]:
    """Return where notices come from. `auto` believes this machine alone: its firmware and its environment."""
    if choice != "auto":
        return tuple(place for place in (*CLOUDS, "kubernetes", "slurm") if place == choice)
    found: list[NoticePlace] = []
    if "Amazon EC2" in firmware:
        found.append("aws")
    if "Google" in firmware:
        found.append("gcp")
    if _AZURE_TAG in firmware:
        found.append("azure")
    if environment.get("KUBERNETES_SERVICE_HOST"):
        found.append("kubernetes")
    if environment.get("SLURM_JOB_ID"):
        found.append("slurm")
    return tuple(found)


def aws_action(body: bytes, now: float) -> Notice | None:
    """Read spot/instance-action. `now` is the time of day."""
    try:
        said = msgspec.json.decode(body, type=_AwsAction)
        at = datetime.fromisoformat(said.time)
    except _UNREADABLE:
        return None
    if said.action not in ("terminate", "stop", "hibernate"):
        return None
    return Notice(f"AWS: {said.action}", _left(at, now))


def gcp_preempted(body: bytes) -> Notice | None:
    return Notice("Google Cloud: preempted", GCP_PREEMPTION_S) if body.strip().upper() == b"TRUE" else None


def gcp_maintenance(body: bytes) -> Notice | None:
    """Read maintenance-event. A machine that is moved while it runs stays."""
    if body.strip().upper() != b"TERMINATE_ON_HOST_MAINTENANCE":
        return None
    return Notice("Google Cloud: terminated for maintenance", GCP_TERMINATION_S)


def azure_events(body: bytes, own_name: str, now: float) -> Notice | None:
    """Read scheduled events, and return the nearest one that takes this machine. Without a name, all are ours."""
    try:
        events = msgspec.json.decode(body, type=_AzureEvents).Events
    except _UNREADABLE:
        return None
    found = [
        Notice(f"Azure: {one.EventType}", _azure_left(one, now))
        for one in events
        if one.EventType in _AZURE_LEAVES and (not own_name or own_name in one.Resources)
    ]
    return min(found, key=lambda one: one.left_s, default=None)


def _azure_left(event: _AzureEvent, now: float) -> float:
    if event.EventStatus == "Started":
        return 0.0
    try:
        return _left(parsedate_to_datetime(event.NotBefore), now)
    except _UNREADABLE:
        return AZURE_PREEMPTION_S


def signalled(found: tuple[NoticePlace, ...], environment: Mapping[str, str], now: float) -> Notice:
    """Return what SIGTERM says of the time that is left: nothing, outside of a pod or a job."""
    if "slurm" in found:
        left_s = _number(environment.get("SLURM_JOB_END_TIME", "")) - now
        return Notice("Slurm: the job's time is over", left_s if 0.0 < left_s <= _SLURM_NEAR_S else 0.0)
    if "kubernetes" in found:
        grace_s = _number(environment.get(GRACE_VARIABLE, ""))
        grace_s = KUBERNETES_GRACE_S if math.isnan(grace_s) else grace_s
        return Notice("Kubernetes: the pod is ended", min(max(0.0, grace_s), MAX_NOTICE_S))
    return Notice("SIGTERM", 0.0)


def _left(at: datetime, now: float) -> float:
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return min(max(0.0, at.timestamp() - now), MAX_NOTICE_S)


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text) else math.nan
