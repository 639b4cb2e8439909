"""The scheduler's commands, carried out: each becomes a frame for the worker or the trainer that it concerns.

Rules kept here: nothing is decided. A frame waits in its peer's session until the journal is written. A peer that is
not connected is told when it dials again, from the state (from_workers.py, from_trainer.py).
"""

import logging

from msgspec import structs

from polyrl.errors import LawViolation
from polyrl.ids import GroupId, LeaseId, SampleId, Seconds, Step, Version, WorkerName, group_of, index_of, show_sample
from polyrl.manager import to_hosts
from polyrl.manager.calls import prompt_of
from polyrl.manager.notes import Granted
from polyrl.manager.payload import SampleTokens
from polyrl.manager.peers.link import Link
from polyrl.manager.peers.relay_addresses import reachable
from polyrl.manager.peers.sessions import WorkerSession
from polyrl.manager.run import Run
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.samples import NO_VERSION
from polyrl.scheduling.rules.order import mix64
from polyrl.wire import columns, frames
from polyrl.wire.columns import CELL_BYTES, in_pieces

log = logging.getLogger("polyrl.manager")


def carry_out(run: Run, command: c.Command) -> None:  # noqa: C901 (a case for each kind)
    match command:
        case c.Generate():
            _generate(run, command)
        case c.Abort():
            if (session := run.lobby.session(command.worker)) is not None:
                session.abort(command.lease)
            _account(run, command)
        case c.ForgetTokens():
            _forget_tokens(run, command)
        case c.HandOver():
            if (session := run.lobby.session(command.worker)) is not None:
                session.hand_over(command.lease)
        case c.PullWeights():
            if (session := run.lobby.session(command.worker)) is not None:
                held = NO_VERSION if command.held is None else command.held
                send_to_pull(run, session, command.version, command.source or "", held)
        case c.ReleaseWorker():
            if (session := run.lobby.session(command.worker)) is not None:
                session.say(frames.Release(command.why))
        case c.ForgetWorker():
            _forget(run, command)
        case c.Score():
            score(run, command.sample, command.attempt, command.timeout_s)
        case c.StartTraining():
            _change_duty(run, command.worker, "training", command.why)
        case c.StartGenerating():
            _change_duty(run, command.worker, "generating", command.why)
        case c.Reshape():
            if run.desk.config.parallelism.engines == "fleet":
                log.info("engines of the fleet: %s", command.why)
                run.say_to_trainer(frames.WidthPlanned(command.tensor_parallel, command.replicas, command.why))
            else:
                _keep_width(run, command)
        case c.PlayEpisode() | c.AnswerCall() | c.StopEpisode() | c.ReleaseHost() | c.ForgetHost():
            to_hosts.carry_out(run, command)
        case _:
            _tell_trainer(run, command)


def _forget(run: Run, command: c.ForgetWorker) -> None:
    session = run.lobby.workers.get(command.worker)
    is_blamed = not command.rejoin and not command.drained
    last = session.last_failure if session is not None and is_blamed else ""
    why = f"{command.why}; the last: {last}" if last else command.why
    run.lobby.forget(command.worker, why, rejoin=command.rejoin, in_anger=is_blamed)


def _keep_width(run: Run, command: c.Reshape) -> None:
    """Leave the trainer's own engines as wide as they are. No run that asks for more is opened; an older one goes on
    with what it has."""
    log.warning("%s: engines stay as wide as they are, for none of them can change it here", command.why)
    for name in [one.name for one in run.lobby.workers.values() if one.facts.local]:
        run.lobby.forget(name, "it joins again, as wide as it is", rejoin=True)


def _account(run: Run, command: c.Abort) -> None:
    """Tell the scheduler of discarded tokens that it had not heard of yet."""
    tokens = run.payload.tokens.get(command.sample)
    more = 0 if tokens is None else tokens.num_tokens - command.num_tokens
    if more > 0 and command.discarded_for is not None:
        run.tell(e.TokensDiscarded(command.discarded_for, more))


def _forget_tokens(run: Run, command: c.ForgetTokens) -> None:
    """Drop a sample's tokens. In the journal that is a lease from the first token on, which ends at once."""
    tokens = run.payload.tokens.get(command.sample)
    if tokens is not None:
        log.warning("sample %s begins anew: %s", show_sample(command.sample), command.why)
        tokens.lease_to("", "", 0)
        run.note_grants()
        run.lobby.journal.add_note(Granted([command.lease], [command.sample], [0], [""]))


def _change_duty(run: Run, name: WorkerName, duty: frames.Duty, why: str) -> None:
    if (session := run.lobby.session(name)) is not None:
        session.say(frames.ChangeDuty(duty, why))


def send_to_pull(run: Run, session: WorkerSession, version: Version, source: str, held: int) -> None:
    """Tell a worker where it fetches a version: at the trainer, or at the peer that the scheduler chose. If the peer
    has no address that the worker can reach, the scheduler is told, and stops naming it as a source."""
    offer = run.payload.offers.get(version)
    if session.link is None:
        return  # it is told when it dials again
    if offer is None:
        session.say(frames.PullOrder(version, source, held))
    elif not source:
        session.say(frames.PullOrder(version, source, held, offer.digest, offer.addresses))
    else:
        peer = run.lobby.workers.get(WorkerName(source))
        addresses = () if peer is None else reachable(peer.weight_addresses, session.link.seen_at)
        if addresses:
            session.say(frames.PullOrder(version, source, held, offer.digest, addresses))
        else:
            why = f"worker {source} has no address for weights that it can reach"
            run.tell(e.WeightsFailed(session.name, session.incarnation, version, why, untried=True))


def _tell_trainer(run: Run, command: c.Command) -> None:  # noqa: C901 (a case for each kind)
    match command:
        case c.OpenRound():
            for group in command.groups:
                run.payload.expect(command.step, group.group)
            run.say_to_trainer(frames.Opened(command.step, command.kind, command.groups, command.why))
        case c.AddGroup():
            run.payload.expect(command.step, command.group.group)
            run.say_to_trainer(frames.Opened(command.step, "", (command.group,), command.why))
        case c.CancelScore():
            run.say_to_trainer(frames.CancelScoring(command.sample, command.attempt))
        case c.DeliverGroup():
            deliver(run, command.step, command.group, command.samples)
        case c.DropGroup():
            run.payload.drop_group(command.group)
            run.no_prompt_yet.pop(command.group, None)
            run.no_task_yet.pop(command.group, None)
            run.say_to_trainer(frames.Dropped(command.group, command.why))
        case c.CloseRound():
            run.say_to_trainer(closed(run, command.step))
        case c.EndData():
            run.say_to_trainer(frames.DataEnded(command.step))
        case c.ReportStep():
            run.payload.drop_step(command.line.step)
            run.say_to_trainer(frames.StepReported(command.line))
        case c.AddAsked():
            pass  # asking.py has the question already
        case c.CloseAsked():
            run.payload.drop_group(command.group)
            if (question := run.questions.pop(command.group, None)) is not None:
                question.close(command)
        case c.AdviseFleet():
            run.say_to_trainer(frames.FleetAdvised(command.num_workers, command.why, command.let_go))
        case _:
            raise LawViolation(f"the manager cannot carry this out: {command}")


def _generate(run: Run, command: c.Generate) -> None:
    tokens = run.payload.tokens_of(command.sample)
    is_shown = group_of(command.sample) in run.questions or bool(tokens.calls)
    migrates = run.desk.config.fleet_rules.migrate or is_shown
    from_token = tokens.num_tokens if migrates else command.from_token
    tokens.lease_to(command.worker, run.lobby.engine_of(command.worker), from_token)
    granted = run.granted
    granted.leases.append(command.lease)
    granted.samples.append(command.sample)
    granted.from_tokens.append(from_token)
    granted.workers.append(command.worker)
    if group_of(command.sample) in run.payload.prompts:
        order(run, command.lease)
    else:
        run.no_prompt_yet.setdefault(group_of(command.sample), []).append(command.lease)


def order(run: Run, lease: LeaseId) -> None:
    """Send a lease to its worker, if it is still open."""
    desk = run.desk
    sample = desk.leases.get(lease)
    if sample is None:
        return
    worker = desk.seats[sample.worker]
    session = run.lobby.session(worker.name)
    prompt = run.payload.prompts.get(sample.group)
    if session is None or prompt is None:
        return
    session.most_held = max(session.most_held, len(worker.leases))
    run.lobby.is_urgent = True  # also where a prompt led to it, and no event
    tokens = run.payload.tokens_of(sample.id)
    if tokens.calls:
        session.order(_order_of_call(run, lease, sample.id, tokens, prompt.sampling))
        return
    question = run.questions.get(sample.group)
    seed = desk.config.seed if question is None else question.seed
    session.order(
        frames.Order(
            lease,
            sample.id,
            prompt.tokens,
            columns.tokens_of(tokens.cells),
            max_tokens(run, sample.id),
            mix64(seed, sample.id if question is None else index_of(sample.id)) >> 1,
            prompt.sampling,
            goes_on=question is not None,
        )
    )


def _order_of_call(
    run: Run, lease: LeaseId, sample: SampleId, tokens: SampleTokens, sampling: frames.Sampling
) -> frames.Order:
    """Make the order for an episode's newest call. Each call draws with random numbers of its own."""
    number = len(tokens.calls) - 1
    record = tokens.calls[number]
    stop_ids = tuple(dict.fromkeys((*sampling.stop_ids, *record.stop_ids)))
    stop = tuple(dict.fromkeys((*sampling.stop, *record.stop)))
    key = (sample, number) if number else (sample,)
    return frames.Order(
        lease,
        sample,
        prompt_of(tokens.calls, tokens.cells, number),
        columns.tokens_of(tokens.cells[record.start * CELL_BYTES :]),
        record.max_tokens,
        mix64(run.desk.config.seed, *key) >> 1,
        structs.replace(sampling, stop_ids=stop_ids, stop=stop) if record.stop_ids or record.stop else sampling,
        record.start,
    )


def max_tokens(run: Run, sample: SampleId) -> int:
    """Return the number of tokens at which an answer is cut off."""
    question = run.questions.get(group_of(sample))
    return run.desk.max_new_tokens if question is None else question.max_tokens


def score(run: Run, sample: SampleId, attempt: int, timeout_s: Seconds) -> None:
    if run.trainer is not None and not run.trainer.has_reward:
        run.tell(e.RewardFinished(sample, attempt, "scored"))
    else:
        group = run.desk.groups[group_of(sample)]
        answer, origin = run.payload.answer(sample), _origin(run, group.id)
        run.say_to_trainer(frames.ScoreThese((frames.ScoreThis(attempt, timeout_s, group.step, answer, origin),)))
        run.payload.tokens_of(sample).sent_on = _link_to_trainer(run)


def _origin(run: Run, group: GroupId) -> frames.Origin:
    known = run.desk.groups[group]
    return frames.Origin(known.domain, known.prompt, known.epoch)


def deliver(run: Run, step: Step, group: GroupId, samples: tuple[SampleId, ...]) -> None:
    """Send a group in as many frames as it takes: it may have a thousand long answers."""
    answers = (_to_deliver(run, sample) for sample in samples)
    parts = list(in_pieces(answers, lambda answer: len(answer.cells))) or [()]
    origin = _origin(run, group)
    for part in parts:
        run.say_to_trainer(frames.Delivered(step, group, origin, part, more=part is not parts[-1]))


def _to_deliver(run: Run, sample: SampleId) -> frames.SamplePayload:
    """Return an answer, or only its reward if the trainer has kept the answer since it scored it. It uses that up."""
    tokens = run.payload.tokens_of(sample)
    sent_on, tokens.sent_on = tokens.sent_on, None
    if sent_on is None or sent_on is not _link_to_trainer(run):
        return run.payload.answer(sample)
    return frames.SamplePayload(sample, b"", (), "", tokens.reward, tokens.parts, is_kept=True)


def _link_to_trainer(run: Run) -> Link | None:
    """Return the trainer's connection; None if it is not connected, or has not sent its Hello."""
    trainer = run.trainer
    return trainer.link if trainer is not None and trainer.greeted else None


def closed(run: Run, step: Step) -> frames.Closed:
    desk = run.desk
    groups = [desk.groups[group] for group in desk.rounds[step].groups]
    delivered, taken = (tuple(one.id for one in groups if one.state == state) for state in ("delivered", "taken"))
    return frames.Closed(step, delivered, taken)
