"""One run as the page shows it: live, over, or simulated.

Rules kept here: a run is only read, from its directory or its journal. The state of a live run comes from its manager
(`tell`), through the owner of this object; nothing here opens a connection.
"""

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import to_builtins

from polyrl.dashboard import alarms, waiting
from polyrl.dashboard.curves import Curves
from polyrl.dashboard.following import Follower
from polyrl.dashboard.rollouts import Rollouts
from polyrl.errors import PolyrlError, UserError
from polyrl.ids import parse_sample
from polyrl.journal.files import LIVE_FOLDER, find_begun, open_journals
from polyrl.journal.story import UnknownSample, tell_story
from polyrl.not_data import NOT_DATA
from polyrl.run.diagnosis import Diagnosis, diagnose, diagnose_remains
from polyrl.run.kept_samples import recipe_of, text_decoder
from polyrl.run.waits import ENDED_BY, choose
from polyrl.run.workers import join_command_of
from polyrl.scheduling.core.ledger import StepLine
from polyrl.telemetry import ledger_report
from polyrl.telemetry.account import read_account
from polyrl.telemetry.metric_names import HEADLINES, describe
from polyrl.trainer.state import entries
from polyrl.wire.control import Status

_ALARMING = (
    "reward/mean", "actor/entropy", "actor/grad_norm", "actor/mismatch_kl", "token/response_length/mean",
    "staleness/mean", "time/step_total", "cost/usd_step", "actor/clip_frac_low", "actor/clip_frac_high",
    "actor/skipped_updates",
)  # fmt: skip
_FOR_ANSWERS = ("answers", "last answers", "places", "no worker")
"""The trainer's waits while answers are written."""
_NOT_WELL = ("run collapsed", "nothing learned")
_STANDS_S = 10.0
_STANDS = 5.0
"""A run whose step lasts that many times as long as those before it stands still."""
_HISTORY = 500
_LEDGER_EVERY_S = 10.0
_LEDGER_REST = 20.0
"""The pause before a journal is read again, as a multiple of the time that reading it took."""
_DIGITS_OR_TEXT = re.compile(r"\d+|\D+")
_SAME_S = 0.5
"""Pages that ask within this time are told the same."""
_ANSWERS_S = 20.0
"""The time for a first look at answers, which waits for a tokenizer."""
_MAX_SERIES = 64
_MOST_WAITS = 12


class WatchedRun:
    """Every method but `tell` may read files for long: call them in a thread."""

    def __init__(self, path: Path, *, live: bool, folder: str | None = None) -> None:
        """`folder` is that of a tokenizer, for a run without a recipe. Raises UserError if there is no run."""
        if not live:
            find_begun(path)
        self.path, self.live = path, live
        self.name = path.resolve().name if path.is_dir() else path.stem
        self.is_simulation = not (path / LIVE_FOLDER).is_dir()
        self.follower = Follower(path, live=live)
        self.curves = Curves(path, self.follower.lines)
        self.rollouts = Rollouts(path, text_decoder(path, folder), self.follower)
        self._statuses: list[Status] = []
        self._heard_at = 0.0
        self._slow_reward = (0.0, "")
        self._lock, self._ledger_lock = threading.Lock(), threading.Lock()
        self._ledger: tuple[float, dict[str, Any]] | None = None
        self._now: tuple[float, dict[str, Any]] | None = None
        self._recipe: dict[str, Any] = {}
        self._join = ""
        self._answers: tuple[int, list[alarms.Alarm]] = (-1, [])
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        self.follower.start()

    def close(self) -> None:
        self.follower.stop()

    def tell(self, status: Status) -> None:
        """Take in the manager's newest state."""
        self._statuses = [*self._statuses, status][-2:]
        self._heard_at = time.monotonic()
        if status.rewards is not None and status.rewards.running:  # between calls, nobody tells which was slow
            self._slow_reward = max(self._slow_reward, (status.rewards.longest_s, status.rewards.function))
        self.follower.tell_time(status.now_s)

    def end(self) -> None:
        """Take in that the manager is gone: the run is over, until it is resumed."""
        self.live, self._statuses = False, []

    # What the page asks for

    def now(self) -> dict[str, Any]:
        """Return what the run does at this moment."""
        with self._lock:
            if self._now is None or time.monotonic() - self._now[0] > _SAME_S:
                self._now = time.monotonic(), self._look()
            return self._now[1]

    def _look(self) -> dict[str, Any]:
        num_steps = self.curves.refresh()
        headlines = {label: self.curves.last(name) for label, name in HEADLINES.items()}
        status = self._statuses[-1] if self._statuses else None
        found = self._diagnosis()
        raised, parts, slow = list(self._alarms(status)), self._parts(), self.slowest()
        moves = found is not None and found.is_moving
        lines = self.follower.lines()
        step_s = waiting.seconds_a_step(lines)
        return {
            "name": self.name,
            "kind": "simulation" if self.is_simulation else "live" if self.live else "over",
            "read": 1.0 if self.follower.is_at_end else self.follower.share_read,
            "trouble": self.follower.trouble,
            "steps": num_steps,
            "last_step": self.curves.steps[-1] if num_steps else None,
            "steps_wanted": self._setting("train", "steps"),
            "headlines": {label: value for label, value in headlines.items() if value is not None},
            "status": None if status is None else _without_fleet(status),
            "status_age_s": None if status is None else time.monotonic() - self._heard_at,
            "moving": moves,
            "well": moves and slow is None and all(one.name not in _NOT_WELL for one in raised),
            "step_s": step_s,
            "stands_s": self._stands_s(lines, step_s),
            "findings": [] if found is None else [one._asdict() for one in found.findings],
            "alarms": [one._asdict() for one in raised],
            "time": [one._asdict() for one in parts],
            "slow": None if slow is None else slow._asdict(),
            "usd": self._spent(status),
            "usd_per_hour": None if status is None else self._price(status),
        }

    def slowest(self) -> waiting.Slowest | None:
        """Return what holds the run up; None: nothing does much, or its journal is not read yet."""
        return waiting.slowest(self._parts(), self.context())

    def _parts(self) -> list[waiting.TimePart]:
        """Return where the trainer's time goes; nothing before the journal is read: it would be that of the past."""
        return self.follower.time_parts() if self.follower.is_at_end else []

    def _diagnosis(self) -> Diagnosis | None:
        if len(self._statuses) == 2:
            earlier, now = self._statuses
            packs = self._setting("rounds", "tail_batching")
            return diagnose(earlier, now, str(self.path), tail_batching=packs)
        if self.live or self.is_simulation:
            return None
        steps = [{"reward/mean": value} for value in self.curves.column("reward/mean")]
        return diagnose_remains(self.path, steps)

    def raised(self) -> list[alarms.Alarm]:
        """Return the alarms of this moment, after the newest answers were looked at."""
        self.now()
        if self._reader is not None:
            self._reader.join(_ANSWERS_S)
        with self._lock:
            return [*self._alarms(self._statuses[-1] if self._statuses else None)]

    def _alarms(self, status: Status | None) -> Iterator[alarms.Alarm]:
        series = {name: self.curves.tail(name, _HISTORY) for name in _ALARMING}
        around = self._alarm_context(status)
        found = [*alarms.of_metrics(series, around), *self._look_at_answers()]
        yield from alarms.verdict(found, series, around)
        yield from self._of_fleet(status)

    def _alarm_context(self, status: Status | None) -> alarms.AlarmContext:
        parts = self._parts()
        return alarms.AlarmContext(
            self._known_recipe(),
            str(self.path),
            [entries.step_of(one) for one in entries.found(self.path / "checkpoints")],
            self.curves.steps[-1] if self.curves.steps else -1,
            status,
            sum(one.share for one in parts if one.name in _FOR_ANSWERS) if parts else None,
        )

    def _look_at_answers(self) -> list[alarms.Alarm]:
        """Return the alarms of the newest answers that were looked at, and begin to look at newer ones."""
        step = self.curves.steps[-1] if self.curves.steps else -1
        if step != self._answers[0] and not self.is_simulation and not (self._reader and self._reader.is_alive()):
            self._reader = threading.Thread(target=self._of_answers, args=(step,), name="answers", daemon=True)
            self._reader.start()  # the first texts wait for a tokenizer, for seconds; nothing else has to
        return self._answers[1]

    def _of_fleet(self, status: Status | None) -> Iterator[alarms.Alarm]:
        if status is not None:
            allowed = self._setting("train", "max_staleness") or 1
            yield from alarms.of_fleet(status, self.follower.paces(), allowed, str(self.path))

    def _of_answers(self, step: int) -> None:
        """Look at the answers of the newest step, for alarms that are told from then on."""
        found: list[alarms.Alarm] = []
        with contextlib.suppress(UserError):  # removed meanwhile, or their model's directory was
            samples = self.rollouts.newest()
            texts = [self.rollouts.preview(one) for one in samples]
            found = [*alarms.of_answers([one.answer for one in samples], texts)]
        self._answers = step, found

    def _spent(self, status: Status | None) -> float | None:
        """Return what the run has cost: by the journal, as the ledger does; until it is read, by the manager."""
        if self.follower.is_at_end and not self.follower.trouble:
            return self.follower.spent_usd()
        told = None if status is None else status.ledger.get("usd")
        return self.curves.last("cost/usd_total") if told is None else told

    def _join_command(self) -> str:
        if not self._join and self.live:
            with contextlib.suppress(PolyrlError, OSError):
                self._join = join_command_of(self.path)
        return self._join

    def _price(self, status: Status) -> float:
        """Return what an hour costs at the present fleet."""
        workers = sum(one.price_usd_per_hour for one in status.workers)
        hosts = sum(one.price_usd_per_hour for one in status.hosts)
        return workers + hosts + (self.follower.trainer_usd_per_hour if status.trainer != "none" else 0.0)

    def context(self) -> waiting.WaitingContext:
        """Return what is known of the run beside where its time goes."""
        status = self._statuses[-1] if self._statuses else None
        slow_workers = [one.of for one in self._of_fleet(status) if one.name == "slow worker"]
        return waiting.WaitingContext(
            status,
            self.follower.lines(),
            slow_workers,
            self._join_command(),
            recipe=self._known_recipe(),
            run_dir=str(self.path),
            reward_function=self._slow_reward[1] or self._only_reward(),
            last_loss=self._last_loss(),
        )

    def _stands_s(self, lines: Sequence[StepLine], step_s: float | None) -> float | None:
        """Return for how long no step of a live run has ended; None: hardly longer than a step takes."""
        stands_s = self.follower.time_now() - lines[-1].trained_at if self.live and lines else 0.0
        return stands_s if stands_s > max(_STANDS_S, _STANDS * (step_s or 0.0)) else None

    def _last_loss(self) -> str:
        """Return why the worker that was lost last was; empty: none was."""
        lost = [one for one in self.follower.lives() if one.ending == "lost" and one.ended_at is not None]
        return max(lost, key=lambda one: one.ended_at or 0.0).why if lost else ""

    def _only_reward(self) -> str:
        """Return the recipe's reward function; nothing where it has several, or names none."""
        named = self._setting("data", "reward")
        return named if isinstance(named, str) and not self._setting("rewards", "functions") else ""

    def _setting(self, section: str, key: str) -> Any:
        """Return what the recipe says; None: nothing."""
        return self._known_recipe().get(section, {}).get(key)

    def _known_recipe(self) -> dict[str, Any]:
        """Return the recipe, which is read until it is there."""
        if not self._recipe:
            with contextlib.suppress(PolyrlError):
                self._recipe = recipe_of(self.path)
        return self._recipe

    def metric_names(self) -> list[dict[str, str]]:
        with self._lock:
            self.curves.refresh()
            known = [(name, describe(name)) for name in self.curves.names]
        return [
            {"name": name, "unit": "" if one is None else one.unit, "meaning": "" if one is None else one.meaning}
            for name, one in known
        ]

    def series(self, names: list[str], axis: str) -> dict[str, Any]:
        with self._lock:
            self.curves.refresh()
            columns = {name: self.curves.column(name) for name in names[:_MAX_SERIES]}
            return {"x": self.curves.axis(axis), "steps": self.curves.steps, "columns": columns}

    def fleet(self, text: str, first: int, most: int) -> dict[str, Any]:
        """Return at most `most` of the workers whose name, state or engine contains `text`.

        A run without a manager tells of the workers that it had.
        """
        status = self._statuses[-1] if self._statuses else None
        rows = self._had() if status is None else [to_builtins(one) for one in status.workers]
        facts = ("name", "state", "engine")
        found = [one for one in rows if any(text in one.get(fact, "") for fact in facts)]
        found.sort(
            key=lambda one: [
                (int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS_OR_TEXT.findall(one["name"])
            ]
        )
        others = {} if status is None else {
            "hosts": to_builtins(status.hosts), "reward_workers": to_builtins(status.reward_workers),
            "turned_away": to_builtins(status.turned_away),
        }  # fmt: skip
        return {
            "is_there": status is not None,
            "num": len(found),
            "num_all": len(rows),
            "workers": found[first:][:most],
            **others,
        }

    def _had(self) -> list[dict[str, Any]]:
        """Return the workers that the journal tells of."""
        now, found = self.follower.time_now(), dict[str, dict[str, Any]]()
        for life in self.follower.lives():
            one = found.setdefault(
                life.worker, {"name": life.worker, "joined": 0, "lost": 0, "seconds": 0.0, "usd": 0.0}
            )
            until = now if life.ended_at is None else life.ended_at
            one["joined"] += 1
            one["lost"] += life.ending == "lost"
            one["seconds"] += until - life.began_at + life.starting_s
            one["usd"] += life.usd(until)
            one |= {"spot": life.spot, "state": life.ending or "there at the end", "why": life.why}
            one["price_usd_per_hour"] = life.price_usd_per_hour
        return [*found.values()]

    def story(self, sample: str) -> list[str]:
        """Return a sample's life in lines. Raises UserError."""
        try:
            return tell_story(open_journals(self.path), parse_sample(sample))
        except (ValueError, UnknownSample) as error:
            raise UserError(str(error)) from error

    def ledger(self) -> dict[str, Any]:
        """Return the account of the run, at most a few seconds old."""
        with self._ledger_lock:
            if self._ledger is None or (self.live and time.monotonic() > self._ledger[0]):
                began = time.monotonic()
                account = read_account(self.path)
                took = time.monotonic() - began
                text = ledger_report.as_text(account, self.name, verified=False)
                again_at = time.monotonic() + max(_LEDGER_EVERY_S, _LEDGER_REST * took)
                told = ledger_report.as_json(account, self.name, None)
                dollars = dollars_by_cause(told, self.follower.trainer_shares())
                self._ledger = again_at, {**told, "dollars": dollars, "text": text}
            return self._ledger[1]


def dollars_by_cause(ledger: Mapping[str, Any], trainer_shares: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return what was spent, on whom and on what: a worker's dollars are shared out by its seconds."""
    usd, workers = ledger["usd"], dict[str, float]()
    for one in ledger["workers"]:
        in_all = sum(one["seconds"].values())
        for activity, seconds in one["seconds"].items():
            workers[activity] = workers.get(activity, 0.0) + one["usd"] * seconds / max(in_all, 1e-9)
    trainer = {words: usd["trainer"] * share for words, share in trainer_shares.items()}
    others = {"hosts": usd["hosts"], "reward workers": usd["reward_workers"]}
    return {"trainer": trainer, "workers": workers, **{name: {"in all": spent} for name, spent in others.items()}}


def _without_fleet(status: Status) -> dict[str, Any]:
    """Return the state without its longest lists: pages of many workers are asked for (`fleet`)."""
    waits = choose(status.waits, _MOST_WAITS)
    short = msgspec.structs.replace(
        status, workers=(), hosts=[], reward_workers=[], turned_away=[], waits=tuple(waits.shown)
    )
    counts = {"num_workers": len(status.workers), "num_hosts": len(status.hosts), "more_waits": waits.more}
    told = to_builtins(short)
    return {**told, **counts, "waits": [{**one, "ended_by": ENDED_BY.get(one["what"], "")} for one in told["waits"]]}


def read_status(line: bytes) -> Status | None:
    """Return the state in a line of the manager's; None if it is none."""
    try:
        return msgspec.json.decode(line, type=Status)
    except NOT_DATA:
        return None
