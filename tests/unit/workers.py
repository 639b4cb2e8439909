"""Workers for tests of pure rules: active, generating, with what a test says of them."""

from polyrl.ids import Incarnation, LeaseId, SampleId, Version, WorkerName
from polyrl.scheduling.core.fleet import Worker


def worker(
    seat: int, *, num_leases: int = 0, plateau: int = 8, version: int = 0, spot: bool = False, **others
) -> Worker:
    made = Worker(
        seat=seat,
        name=WorkerName(f"w{seat}"),
        incarnation=Incarnation(1),
        slots=plateau,
        spot=spot,
        local=False,
        num_devices=1,
        kv_tokens=0,
        since=0.0,
        state="active",
        version=Version(version),
        plateau=plateau,
    )
    made.leases = {LeaseId(100 * seat + i): SampleId(i) for i in range(num_leases)}
    for name, value in others.items():
        setattr(made, name, value)
    return made


def know_speed(one: Worker, *, fixed_s: float = 0.02, per_sample_s: float = 0.001) -> Worker:
    """Let it have been seen at one to sixteen samples."""
    for num in [1, 2, 4, 8, 16] * 4:
        one.speed.observe(num, fixed_s + per_sample_s * num)
    return one
