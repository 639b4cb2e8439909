"""A manager without sockets, its workers and its trainer, played by a seed: what they say is all that is random.

It is the live driver itself: sessions, journal, payload and scheduler. Time is moved by hand.
"""

import random
from collections.abc import Mapping
from pathlib import Path

from polyrl.ids import WorkerName, group_of
from polyrl.manager import opening
from polyrl.manager.frames_in import from_trainer, from_workers, joining
from polyrl.manager.peers.link import AnyFrame, Link
from polyrl.manager.peers.sessions import WorkerSession
from polyrl.manager.service import Service
from polyrl.manager.settings import JournalSettings, ManagerSettings
from polyrl.scheduling.core.parameters import DomainData, FleetRules, RoundsConfig, SchedulerConfig
from polyrl.wire import columns, frames
from polyrl.wire.columns import pack_cells
from polyrl.wire.control import JoinRequest, RunReply, RunRequest
from polyrl.wire.frames import PROTOCOL, Ended, EndReason, NewTokens, PromptPayload, SamplePayload, Sampling

CONFIG = SchedulerConfig(
    domains=(DomainData(name="d", prompts_per_step=2, num_prompts=50),),
    max_new_tokens=6,
    rounds=RoundsConfig(samples_per_prompt=2),
    fleet_rules=FleetRules(heartbeat_timeout_s=1000.0, max_failures=1000),
)
SMALL_FILES = ManagerSettings(journal=JournalSettings(fsync="never", segment_mb=0.002))


def cells(*tokens: int) -> bytes:
    return pack_cells(tokens, [-0.5] * len(tokens))


def tokens_frame(lease: int, offset: int, tokens: list[int], version: int = 0, end: Ended | None = None) -> NewTokens:
    def column(kind: str, number: int) -> bytes:
        return columns.pack_column(kind, [number] if tokens else [])

    return NewTokens(
        1,
        column("<u8", lease),
        column("<u4", offset),
        column("<u4", len(tokens)),
        column("<i4", version),
        cells(*tokens),
        () if end is None else (end,),
    )


class Line(Link):
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.seen_at = "127.0.0.1"
        self.sent: list[bytes] = []

    def send(self, frame: AnyFrame) -> None:
        self.sent.append(frames.encode(frame))

    def close(self, reason: str, code: int = 1001) -> None:
        pass


class Worker:
    """A worker as the manager sees it: it makes what it is asked for, whenever it is told to."""

    def __init__(self, service: Service, name: str, *, local: bool = False, slots: int = 3) -> None:
        self._lobby = service.lobby
        former = self._lobby.workers.get(WorkerName(name))
        if former is not None and former.link is not None:
            from_workers.gone(former, former.link)
        reply = joining.join(
            self._lobby,
            JoinRequest(
                name=name,
                protocol=PROTOCOL,
                engine="none",
                slots=slots,
                version=None if self.published() < 0 else self.published(),
                local=local,
                num_devices=2 if local else 1,
            ),
            self._lobby.absent.get(WorkerName(name), ("", 0.0))[0] if former is None else former.key,
        )
        session = joining.find_worker(self._lobby, reply.session)
        assert session is not None
        self.session: WorkerSession = session
        self.line = Line()
        self.session.connect(self.line)
        self.version = self.published()
        self.at: dict[int, int] = {}
        """Where it stands, by lease; also of those that are over."""
        self.say(frames.Hello(self.version, b""))

    def published(self) -> int:
        return self._lobby.need_run().desk.state.published

    def say(self, frame: frames.FromWorker) -> None:
        from_workers.said(self._lobby, self.session, self.line, frames.encode(frame))

    def listen(self) -> None:
        for frame in map(frames.decode_to_worker, self.line.sent):
            match frame:
                case frames.Orders():
                    self.at |= {one.lease: len(one.so_far) // 4 for one in frame.orders}
                case frames.PullOrder():
                    self.version = frame.version
                    self.say(frames.Installed(frame.version))
                case frames.ChangeDuty():
                    self.say(frames.OnDuty(frame.duty))
                case frames.Stop():
                    for lease in frame.hand_overs:
                        if lease in self.at:
                            self.say(tokens_frame(lease, 0, [], end=Ended(lease, self.at[lease], "handed_over")))
                case _:
                    pass
        self.line.sent.clear()

    def write(self, rng: random.Random) -> None:
        """A token or two of one of its leases, be it over or not, and perhaps the end."""
        cap = self._lobby.need_run().desk.max_new_tokens
        if not self.at:
            return
        lease = rng.choice(sorted(self.at))
        offset = self.at[lease]
        tokens = [rng.randrange(1000) for _ in range(min(rng.randint(1, 2), cap - offset))]
        self.at[lease] = total = offset + len(tokens)
        reasons: list[EndReason] = ["stop", "handed_over", "engine_failed"]
        is_full = total == cap
        reason = "length" if is_full else rng.choice(reasons)
        end = Ended(lease, total, reason) if is_full or rng.random() < 0.5 else None
        self.say(tokens_frame(lease, offset, tokens, self.version, end))


class Manager:
    """A manager without sockets, its workers and its trainer, played by a seed."""

    def __init__(self, run_dir: Path, seed: int, config: SchedulerConfig = CONFIG) -> None:
        self.rng = random.Random(seed)
        self.service = Service(run_dir, SMALL_FILES)
        self.lobby = self.service.lobby
        opened = self.open_run(config)
        assert opened.fresh
        trainer = self.lobby.need_run().trainer
        assert trainer is not None
        self.trainer, self.line = trainer, Line()
        self.trainer.connect(self.line)
        self.step = 0
        self.seq = 0
        self.delivered: list[int] = []
        self.is_closed = False
        self.workers: dict[str, Worker] = {}
        self.state(frames.TrainerHello())
        self.state(frames.Published(self.next_seq(), 0))
        self.state(frames.RequestRound(self.next_seq(), 0))

    def open_run(self, config: SchedulerConfig) -> RunReply:
        return opening.open_run(self.lobby, RunRequest(protocol=PROTOCOL, config=config, has_reward=True))

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def state(self, frame: frames.FromTrainer) -> None:
        from_trainer.said(self.lobby, self.trainer, self.line, frames.encode(frame))

    def play(self) -> None:
        """Somebody does something, and it is committed."""
        what = self.rng.choice(["write"] * 12 + ["join", "leave", "train"])
        if what == "join" or not self.workers:
            name = self.rng.choice("abc")
            self.workers[name] = Worker(self.service, name)
        elif what == "leave":
            name = self.rng.choice(sorted(self.workers))
            self.workers.pop(name).say(frames.Goodbye("it is enough"))
        elif what == "write":
            self.workers[self.rng.choice(sorted(self.workers))].write(self.rng)
        elif self.delivered and self.is_closed:
            self.train()
        self.commit()

    def play_all(self) -> None:
        """As `play`, with the trainer's own worker, reports, and time that passes."""
        what = self.rng.choice(["play"] * 6 + ["report", "wait", "local"])
        if what == "report":
            for worker in self.workers.values():
                worker.say(frames.Report(1, self.rng.randrange(3), 0.5, self.rng.randrange(9), 1.0))
        elif what == "wait":
            self.wait(self.rng.choice([0.01, 0.1, 1.0, 3.0, 60.0, 1e4]))
        elif what == "local":
            self.workers["local"] = Worker(self.service, "local", local=True)
        else:
            self.play()
        self.commit()

    def wait(self, seconds: float) -> None:
        self.lobby.set_clock(self.lobby.now() + seconds)
        self.lobby.need_run().pass_time()

    def commit(self) -> None:
        self.lobby.commit()
        self.listen()
        self.lobby.commit()

    def train(self) -> None:
        self.state(frames.Took(self.next_seq(), self.step, tuple(self.delivered)))
        self.state(frames.StepDone(self.next_seq(), self.step))
        self.step += 1
        self.delivered, self.is_closed = [], False
        self.state(frames.Published(self.next_seq(), self.step))
        self.state(frames.RequestRound(self.next_seq(), self.step))

    def listen(self) -> None:
        for worker in self.workers.values():
            worker.listen()
        for frame in map(frames.decode_to_trainer, self.line.sent):
            match frame:
                case frames.Opened():
                    prompts = (
                        PromptPayload(one.group, columns.pack_tokens([one.prompt]), Sampling()) for one in frame.groups
                    )
                    self.state(frames.SupplyPrompts(self.next_seq(), tuple(prompts)))
                case frames.ScoreThese():
                    for one in frame.samples:
                        value = self.rng.random()
                        self.state(
                            frames.Scored(self.next_seq(), one.answer.sample, one.attempt, "scored", value, False, 0.0)
                        )
                case frames.Delivered():
                    if not frame.more and frame.group not in self.delivered:
                        self.delivered.append(frame.group)
                case frames.Dropped():
                    self.delivered = [one for one in self.delivered if one != frame.group]
                case frames.Closed():
                    self.is_closed = True
                case _:
                    pass
        self.line.sent.clear()


def kept(service: Service) -> Mapping[str, PromptPayload | SamplePayload]:
    """All that somebody may still ask for."""
    groups, payload = service.lobby.need_run().desk.groups, service.lobby.need_run().payload
    texts = {f"sample {one}": payload.answer(one) for one in payload.tokens if group_of(one) in groups}
    return {f"prompt of {group}": prompt for group, prompt in payload.prompts.items()} | texts
