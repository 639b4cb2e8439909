"""Groups that the trainer takes, and what is settled when their step is trained.

Rules kept here: a sample is trained if and only if the trainer took its group. Groups that were not taken when the step
ended are discarded. Workers of which the trainer left samples out are not believed, whatever else of theirs it trained.
"""

from collections.abc import Sequence

from polyrl.ids import GroupId, Seconds, Step, WorkerName
from polyrl.scheduling.core.commands import CloseRound, DeliverGroup
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.ledger import length_bin
from polyrl.scheduling.core.samples import Round, TrackedGroup
from polyrl.scheduling.parts.rounds import discard_group, forget, samples_of
from polyrl.scheduling.rules import tail_batching
from polyrl.scheduling.rules.play_limits import TICKS_PER_S


def groups_taken(desk: Desk, step: Step, groups: tuple[GroupId, ...]) -> bool:
    """Return whether a micro-batch began: none does by repeated news."""
    began = False
    for group_id in groups:
        group = desk.groups.get(group_id)
        if group is None or group.step != step or group.state != "delivered":
            desk.ledger.late_news += 1
        else:
            group.state = "taken"
            began = True
    return began


def give_again(desk: Desk, step: Step) -> None:
    """Deliver the taken groups again and close the round again, for a trainer that begins the step anew."""
    round_ = desk.rounds.get(step)
    if round_ is None:
        desk.ledger.late_news += 1
        return
    for group_id in round_.groups:
        group = desk.groups[group_id]
        if group.state == "taken":
            group.state = "delivered"
            kept = tuple(sample.id for sample in samples_of(desk, group) if sample.state == "scored")
            desk.commands.append(DeliverGroup(step, group_id, kept, "the trainer begins the step anew"))
    if round_.closed_at is not None:
        desk.commands.append(CloseRound(step, round_.num_delivered, "the trainer begins the step anew"))


def train_taken(desk: Desk, round_: Round, left_out: Sequence[WorkerName], now: Seconds) -> tuple[int, int, int]:
    """Settle every group of a step that is trained. Return (groups, samples, longest answer) trained."""
    state = desk.state
    ledger = desk.ledger
    num_groups = num_samples = longest = 0
    for group_id in list(round_.groups):
        group = desk.groups[group_id]
        if group.state != "taken":
            discard_group(desk, group, round_, "not_taken", "the step ended without it", now)
            ledger.drop_prompt("not_taken")
            continue
        trained = [sample for sample in samples_of(desk, group) if sample.state == "scored"]
        for writer in (desk.seats.get(sample.writer) for sample in trained):
            if writer is not None:
                writer.is_believed = True
        lengths = [sample.num_tokens for sample in trained]
        for num_tokens in lengths:
            ledger.trained_by_bin[length_bin(num_tokens)] += 1
        ledger.tokens_kept += sum(lengths)
        ledger.samples_trained += len(lengths)
        ledger.prompts_trained += 1
        measured = _measured(desk, group, lengths)
        if measured and desk.config.rounds.adaptive:
            state.tail.correlation.observe(measured)
        if measured:
            desk.planner.remember(state.tail, group.domain, group.prompt, sum(measured) / len(measured))
        num_groups += 1
        num_samples += len(lengths)
        longest = max(longest, *lengths)
        forget(desk, group)
    for name in left_out:
        if (worker := desk.seats.get(desk.state.fleet.by_name.get(name, -1))) is not None:
            worker.is_believed = False
    del desk.rounds[round_.step]
    return num_groups, num_samples, longest


def _measured(desk: Desk, group: TrackedGroup, lengths: list[int]) -> list[int]:
    """Return how long the group's samples were, for tail batching: their tokens, or hundredths of a second; of episodes
    that were begun again, nothing."""
    if not tail_batching.is_timed(desk.config.rounds, desk.config.domains[group.domain]):
        return lengths
    clocks = [desk.state.playtimes.get(one.id) for one in samples_of(desk, group) if one.state == "scored"]
    return [max(1, round(one.took_s * TICKS_PER_S)) for one in clocks if one is not None and one.took_s is not None]
