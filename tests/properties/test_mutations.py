"""The laws have teeth: each of these bugs, planted in a copy of the package, is found by some test.

A mutation is an edit of the source. Its old text must occur exactly once, so an edit that has gone stale with the code
fails loudly instead of proving nothing.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Mutation(NamedTuple):
    bug: str
    file: str
    old: str
    new: str


MUTATIONS = [
    Mutation(
        "a lost worker keeps its samples",
        "parts/membership.py",
        'leases.requeue(desk, sample, desk.round_of(sample), now, "lost")',
        "pass",
    ),
    Mutation(
        "a lost worker's samples start again although they had tokens",
        "parts/leases.py",
        'if cause == "lost" and not desk.config.fleet_rules.migrate and',
        'if cause == "lost" and',
    ),
    Mutation(
        "a worker's word about somebody else's lease is believed",
        "handlers.py",
        "if sample is None or sample.worker != seat:",
        "if sample is None:",
    ),
    Mutation(
        "news of an earlier life of a worker is believed",
        "core/fleet.py",
        "return worker if worker.incarnation == incarnation else None",
        "return worker",
    ),
    Mutation(
        "an absence of the driver is paid for before anybody is heard of",
        "core/fleet.py",
        "if now > worker.since and not worker.unheard:",
        "if now > worker.since:",
    ),
    Mutation(
        "two lives of a name are paid for the same seconds",
        "parts/membership.py",
        "min(_sane(event.starting_s), unpaid_s)",
        "_sane(event.starting_s)",
    ),
    Mutation(
        "a repeated join resurrects a worker",
        "parts/membership.py",
        "event.incarnation <= newest_life:",
        "event.incarnation < newest_life:",
    ),
    Mutation(
        "the process that replaced a lost one is forgotten in its place",
        "parts/membership.py",
        '"a newer process joined under its name", now, tell=False)',
        '"a newer process joined under its name", now, tell=True)',
    ),
    Mutation(
        "the tokens of a discarded sample are not in the ledger",
        "parts/leases.py",
        "desk.ledger.discard(cause, sample.num_tokens)",
        "desk.ledger.discard(cause, 0)",
    ),
    Mutation(
        "a discarded sample is not aborted",
        "parts/leases.py",
        "desk.commands.append(Abort(worker.name, lease, why, sample.id, sample.num_tokens, cause))",
        "pass",
    ),
    Mutation(
        "the race is decided by rewards instead of answers",
        "parts/rounds.py",
        'scoring.score(desk, sample, group)\n    if group.state == "open" and group.num_generated >= group.need:',
        'scoring.score(desk, sample, group)\n    if group.state == "open" and group.num_scored >= group.need:',
    ),
    Mutation(
        "more groups get a place than the step has",
        "parts/rounds.py",
        "if round_.claims[domain] < round_.quotas[domain] or round_.num_open[domain] == 0:",
        "if round_.claims[domain] <= round_.quotas[domain] or round_.num_open[domain] == 0:",
    ),
    Mutation(
        "a deferral is not counted",
        "rules/tail_batching.py",
        "choice.times_deferred + 1, first))",
        "choice.times_deferred, first))",
    ),
    Mutation(
        "a deferred prompt is forgotten",
        "parts/rounds.py",
        "    desk.planner.defer(desk.state.tail, _choice_of(group), round_.step)\n",
        "",
    ),
    Mutation(
        "an epoch ends although prompts of it are deferred",
        "rules/tail_batching.py",
        "self.domains[domain].num_prompts and not state.deferred[domain]\n",
        "self.domains[domain].num_prompts\n",
    ),
    Mutation(
        "a prompt of the epoch is passed by",
        "rules/tail_batching.py",
        "        cursor.position += 1\n",
        "        cursor.position += 2 if cursor.position == 3 and self.domains[domain].num_prompts > 4 else 1\n",
    ),
    Mutation(
        "the answer to an earlier attempt at a reward counts",
        "parts/scoring.py",
        "if sample is None or sample.attempt != event.attempt or sample.id not in scoring.running:",
        "if sample is None or sample.id not in scoring.running:",
    ),
    Mutation(
        "a reward that could not be had counts as one",
        "handlers.py",
        'if event.outcome in ("infrastructure_failed", "no_reward"):',
        'if event.outcome == "never":',
    ),
    Mutation(
        "a reward that nobody answers is waited for without end",
        "parts/scoring.py",
        "        desk.deadlines.set(_LOOK, now + _LOOK_EVERY_S)\n    desk.commands.append(Score(",
        "        pass\n    desk.commands.append(Score(",
    ),
    Mutation(
        "a round opens one version too early",
        "rules/staleness.py",
        "return Step(published + max_staleness)",
        "return Step(published + max_staleness + 1)",
    ),
    Mutation(
        "a sample is written by a version one too old",
        "rules/staleness.py",
        "return Version(max(0, step - max_staleness))",
        "return Version(max(0, step - max_staleness - 1))",
    ),
    Mutation(
        "a lost worker stays in the router",
        "parts/membership.py",
        "    state.fleet.remove(worker, now)\n    desk.router.update(worker)\n",
        "    state.fleet.remove(worker, now)\n",
    ),
    Mutation(
        "a draining worker gets samples",
        "parts/membership.py",
        "    desk.state.fleet.start_drain(worker, now)\n    desk.router.update(worker)\n",
        "    desk.state.fleet.start_drain(worker, now)\n",
    ),
    Mutation(
        "a worker that was given notice is not drained in time",
        "parts/notices.py",
        "        membership.drain(desk, worker, worker.why_leaving, now)\n",
        "        desk.router.update(worker)\n",
    ),
    Mutation(
        "credit is not freed when a sample ends",
        "parts/leases.py",
        "    else:\n        desk.router.update(worker)\n        desk.place_due = True\n",
        "    else:\n        desk.place_due = True\n",
    ),
    Mutation(
        "a hand-over that is not answered is waited for without end",
        "parts/leases.py",
        '    desk.deadlines.set(("hand_over", sample.lease), now + desk.config.fleet_rules.hand_over_timeout_s)\n',
        "",
    ),
    Mutation(
        "a stalled sample is given away and still runs",
        "parts/membership.py",
        "        desk.commands.append(\n"
        '            Abort(worker.name, sample.lease, "it brought no token for too long", '
        "sample.id, sample.num_tokens)\n"
        "        )\n",
        "",
    ),
    Mutation(
        "who holds a version that was replaced goes on as if it held the new one",
        "parts/membership.py",
        "            if not worker.local:  # its weights are the trainer's own\n",
        "            if False:\n",
    ),
    Mutation(
        "the samples of who holds a version that was replaced stay there",
        "parts/membership.py",
        '            _take_back_all(desk, worker, "its version was replaced", "replaced", now)\n',
        "",
    ),
    Mutation(
        "the seeding window ends although nobody else generates",
        "parts/devices.py",
        "    if not _somebody_else_generates(desk):\n",
        "    if False:\n",
    ),
    Mutation(
        "the trainer's devices stay with the trainer when the fleet is gone",
        "parts/devices.py",
        "    if round_.num_waiting and num_taking == 0:\n",
        "    if False:\n",
    ),
    Mutation(
        "repeated news makes the trainer busy for ever",
        "handlers.py",
        "if taking.groups_taken(desk, event.step, event.groups):",
        "if taking.groups_taken(desk, event.step, event.groups) or True:",
    ),
    Mutation(
        "a refill is not seen by the trainer's devices",
        "parts/rounds.py",
        "planned, why))\n    desk.place_due = True\n    desk.devices_due = True\n",
        "planned, why))\n    desk.place_due = True\n",
    ),
    Mutation(
        "a prompt is lost when what a worker wrote of it is rejected",
        "parts/rejecting.py",
        "end = rounds.drop_group if is_ours or is_enough else rounds.write_again",
        "end = rounds.drop_group",
    ),
    Mutation(
        "a round that gets a refill stays closed",
        "parts/rounds.py",
        "        round_.closed_at = None  # the trainer is told anew, with the number that is due now\n",
        "",
    ),
    Mutation(
        "weights are pulled from a worker that is gone",
        "parts/membership.py",
        "leases.worker_gone(desk, worker.seat)\n    _resource_pullers(desk, worker)\n",
        "leases.worker_gone(desk, worker.seat)\n",
    ),
    Mutation(
        "a worker whose engine is down is given samples",
        "rules/routing.py",
        "            and not worker.down\n",
        "",
    ),
    Mutation(
        "an engine that is back is believed to run what it ran before it died",
        "parts/membership.py",
        "    if not worker.local:  # that one has what the trainer has\n",
        "    if False:\n",
    ),
    Mutation(
        "a failed pull is never tried again",
        "handlers.py",
        '        case "retry_pull":\n            desk.pulls_due = True\n',
        '        case "retry_pull":\n            pass\n',
    ),
    Mutation(
        "a worker's time with samples is paid as idle",
        "parts/leases.py",
        "    if not worker.leases:\n        settle(worker, desk.ledger, now)\n",
        "    if not worker.leases:\n",
    ),
    Mutation(
        "designated samples are given up when extras have ended",
        "parts/rounds.py",
        "if running and not (designated and sample.kept):",
        "if running:",
    ),
    Mutation(
        "a group is delivered before all its rewards are there",
        "parts/rounds.py",
        'if group.state != "claimed" or group.num_scored < group.need:',
        'if group.state != "claimed" or group.num_scored < group.need - 1:',
    ),
    Mutation(
        "a sample is resumed one token too far",
        "handlers.py",
        "    leases.note_tokens(desk, sample, event.num_tokens)\n    round_ = desk.round_of(sample)\n",
        "    leases.note_tokens(desk, sample, event.num_tokens + 1)\n    round_ = desk.round_of(sample)\n",
    ),
    Mutation(
        "what was asked is answered on the trainer's own devices",
        "parts/leases.py",
        "group.prefix_worker, remote=True)",
        "group.prefix_worker)",
    ),
    Mutation(
        "tokens that were answered are not in the ledger",
        "parts/asking.py",
        "desk.ledger.tokens_answered += sum(",
        "_ = sum(",
    ),
    Mutation(
        "an answer of which there is enough goes on",
        "parts/asking.py",
        "        desk.commands.append(Abort(worker.name, lease, why, sample.id, sample.num_tokens))\n",
        "",
    ),
    Mutation(
        "what was shown already is taken back when a worker is lost",
        "parts/leases.py",
        "is_shown = round_ is desk.asked or sample.host >= 0",
        "is_shown = sample.host >= 0",
    ),
    Mutation(
        "what a worker returned unasked goes back to it",
        "parts/failures.py",
        'return sample.state != "stopping" and desk.state.rules > 0',
        "return False",
    ),
    Mutation(
        "a worker is given as many samples as it claims to have slots",
        "parts/credit.py",
        "return UNBOUNDED if local or start >= slots or not desk.state.rules else start",
        "return UNBOUNDED",
    ),
    Mutation(
        "a worker that brings nothing earns more",
        "parts/credit.py",
        "sum(sample.num_tokens > sample.moved_at for sample in held)",
        "sum(sample.num_tokens >= 0 for sample in held)",
    ),
    Mutation(
        "tokens that a worker refused to go on from are thrown away and not in the ledger",
        "parts/leases.py",
        'desk.ledger.discard_tokens("refused", sample.num_tokens)',
        "pass",
    ),
]


def look_for_a_bug(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.properties.mutation_check"],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.stdout.startswith(str(folder)), f"another polyrl was looked at: {result.stdout}{result.stderr}"
    return result


def copy_of_the_package(folder: Path) -> Path:
    shutil.copytree(ROOT / "src" / "polyrl", folder / "polyrl", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "polyrl" / "scheduling"


def test_no_bug_is_found_where_none_was_planted(tmp_path):
    copy_of_the_package(tmp_path)
    result = look_for_a_bug(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.bug.replace(" ", "-"))
def test_a_planted_bug_is_found(mutation, tmp_path):
    path = copy_of_the_package(tmp_path) / mutation.file
    source = path.read_text(encoding="utf-8")
    assert source.count(mutation.old) == 1, f"{mutation.file} has changed: renew the mutation"
    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    result = look_for_a_bug(tmp_path)
    assert result.returncode == 1, f"nobody noticed that {mutation.bug}\n{result.stdout}{result.stderr}"
    assert not result.stderr, result.stderr
