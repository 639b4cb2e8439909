"""The simulator's driver: a virtual clock, modelled machines, and the very scheduler that runs live.

It does what a manager does: tells the scheduler what happened, carries its commands out, and wakes it when it asked for
that. The machines, the network, the rewards and the trainer are models; every decision is the scheduler's. The same
scenario and seed give the same events, and the journal's digest shows it.

It leaves out payload: no token is ever made, only counted.
"""

from collections.abc import Callable
from typing import assert_never

from msgspec import structs

from polyrl.config.supply_trace import read_supply_trace
from polyrl.errors import LawViolation, PolyrlError
from polyrl.ids import GroupId, SampleId, Seconds, Step, WorkerName, group_of, index_of
from polyrl.journal.records import JournalDigest, encode_record
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.ledger import StepLine
from polyrl.scheduling.core.parameters import DomainData, SchedulerConfig
from polyrl.scheduling.core.samples import Round
from polyrl.scheduling.invariants import check
from polyrl.scheduling.scheduler import Scheduler
from polyrl.sim.environment_model import EnvironmentModel
from polyrl.sim.episode_times import EpisodeTimes
from polyrl.sim.fleet_model import FleetModel
from polyrl.sim.host_model import HostModel
from polyrl.sim.machines import Agenda
from polyrl.sim.reward_model import ModelledRewards
from polyrl.sim.scenario import Scenario
from polyrl.sim.supply import plan_supply
from polyrl.sim.trainer_model import TrainerModel
from polyrl.sim.workload import Workload, read_trace
from polyrl.telemetry.timeline import Timeline

_CHECK_EVERY = 2000
"""Events between two checks of all laws; a step's end is checked too."""
_HORIZON_S = 30 * 24 * 3600.0
"""Seconds ahead for which the market and the faults are drawn."""
_NO_ANSWER_S = 0.01
"""Scoring an answer that was cut off at the cap: there is nothing to run."""


HostCommand = c.PlayEpisode | c.AnswerCall | c.StopEpisode | c.ReleaseHost | c.ForgetHost


class StuckError(PolyrlError):
    """The run did not end within `run.max_time_s`: who waits for what is in the message."""


def scheduler_config(scenario: Scenario, seed: int) -> SchedulerConfig:
    """Return the scheduler's part of the scenario."""
    prompts = [domain.prompt_tokens for domain in scenario.domains]
    return SchedulerConfig(
        domains=tuple(
            DomainData(
                name=domain.name,
                prompts_per_step=domain.prompts_per_step,
                num_prompts=domain.num_prompts,
                environment="" if domain.environment is None else domain.name,
            )
            for domain in scenario.domains
        ),
        seed=seed,
        num_epochs=scenario.run.num_epochs,
        max_new_tokens=scenario.run.max_new_tokens,
        max_staleness=scenario.run.max_staleness,
        streaming=scenario.run.mode == "streaming",
        trainer_usd_per_hour=scenario.trainer.price_usd_per_hour,
        prompt_tokens=max(1, sum(prompts) // len(prompts)),
        rounds=scenario.rounds,
        routing=scenario.routing,
        seeding=scenario.seeding,
        hand_back=scenario.hand_back,
        parallelism=structs.replace(scenario.parallelism, speed=scenario.decode_speed()),
        rewards=structs.replace(scenario.rewards, slots=scenario.reward_slots),
        fleet_rules=scenario.fleet_rules,
        weight_delivery=scenario.weight_delivery,
        scaling=scenario.scaling,
        environments=scenario.environments,
    )


class Simulation:
    """A run of a scenario."""

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self.scenario = scenario
        self.seed = seed
        self.config = scheduler_config(scenario, seed)
        self.scheduler = Scheduler(self.config)
        self.digest = JournalDigest()
        self.num_events = 0
        self.law_violations: list[str] = []
        self.lines: list[StepLine] = []
        self.tokens_at_step: list[int] = []
        """Tokens trained, with prompts, up to each step's end."""
        self.num_started = 0
        self.started_tokens = 0
        """Natural lengths of all samples started: prompts that were deferred are in it twice."""
        self.num_natural = 0
        self.natural_tokens = 0
        """Natural lengths with every prompt counted once an epoch: what a run that discards nothing would train."""
        self.reused_tokens = self.returned_tokens = 0
        """Of the contexts with which episodes came back for another call: those that the engine still had, and all."""
        self.watch: Callable[[bytes], None] | None = None
        """Gets every record of the journal."""
        self._groups: dict[GroupId, tuple[int, int, int, Step]] = {}
        """By group: domain, prompt, visit, step."""
        self._visits: dict[tuple[int, int], int] = {}
        self._epochs: dict[tuple[int, int], int] = {}
        """In which epoch each prompt was started last."""
        self._started_again: dict[GroupId, None] = {}
        """Groups of prompts that were deferred."""
        self._lengths: dict[SampleId, int] = {}
        self._scoring: dict[SampleId, int] = {}
        self._correct: dict[SampleId, bool] = {}
        length_file, supply_file = scenario.workload.trace, scenario.supply.trace
        trace = None if length_file is None else read_trace(length_file)
        self._supply_trace = None if supply_file is None else read_supply_trace(supply_file)
        self._workload = Workload(
            scenario.domains, scenario.run.max_new_tokens, seed, scenario.workload.growth_per_step, trace
        )
        self._rewards = ModelledRewards(scenario.domains, seed)
        self._agenda = Agenda()
        self._trainer = TrainerModel(scenario, self._agenda.later, self.tell)
        self._fleet = FleetModel(scenario, seed, self._agenda, self._trainer, self.tell, self._find_worker)
        environments = EnvironmentModel(scenario.domains, self._rewards, seed)
        self._hosts = HostModel(scenario, seed, self._agenda, environments, self.tell, self._count_tokens)
        self.episode_times = EpisodeTimes(self.scheduler.desk) if scenario.has_environments else None

    @property
    def now(self) -> Seconds:
        return self._agenda.now

    @property
    def timeline(self) -> Timeline:
        return self._fleet.timeline

    @property
    def gb_between_regions(self) -> float:
        return self._fleet.gb_between_regions

    # Playing

    def run(self, on_step: Callable[[int], None] | None = None) -> None:
        """Play the scenario to its end. Raises StuckError if it does not get there."""
        self._begin()
        shown = 0
        while not self._trainer.done:
            self._play_next()
            if on_step is not None and len(self.lines) > shown:
                shown = len(self.lines)
                on_step(shown)
        self.timeline.end(self.now)
        self._check_laws()

    def _begin(self) -> None:
        scenario = self.scenario
        horizon = min(scenario.run.max_time_s, _HORIZON_S)
        supply = plan_supply(  # first: it refuses what it cannot play, and then nothing has been written yet
            scenario.fleet, scenario.supply, scenario.faults, self.seed, horizon, trace=self._supply_trace
        )
        self._trainer.start()
        for number in range(scenario.trainer.local_workers):
            self._fleet.join(WorkerName(f"local{number + 1}"), local=True)
        for event in supply:
            self._agenda.at(event.at_s, lambda event=event: self._fleet.happen(event))
        self._hosts.start()

    def _play_next(self) -> None:
        agenda = self._agenda
        wakeup, next_at = self.scheduler.wakeup_at, agenda.next_at()
        if wakeup is not None and (next_at is None or wakeup <= next_at):
            agenda.now = max(agenda.now, wakeup)
            self.tell(e.TimePassed())
        elif next_at is not None:
            agenda.do_next()
        else:
            raise StuckError(f"nothing is left to happen at {self.now:.0f} s; {self._who_waits()}")
        if agenda.now > self.scenario.run.max_time_s:
            raise StuckError(f"not done after run.max_time_s = {self.scenario.run.max_time_s:g} s; {self._who_waits()}")
        self._fleet.set_alarms()

    def _who_waits(self) -> str:
        state = self.scheduler.desk.state
        rounds = ", ".join(
            f"round {one.step}: {one.num_waiting} samples wait, {one.num_leased} run{_away(one)}"
            for one in state.rounds.values()
        )
        return f"step {self._trainer.step}; {rounds or 'no round is open'}; {len(state.fleet.seats)} workers"

    def _find_worker(self, name: WorkerName) -> Worker | None:
        fleet = self.scheduler.desk.state.fleet
        seat = fleet.by_name.get(name)
        return None if seat is None else fleet.seats[seat]

    def _count_tokens(self, sample: SampleId) -> int:
        return self.scheduler.desk.samples[sample].num_tokens

    def tell(self, event: e.Event) -> None:
        """Tell the scheduler, and carry out what it wants."""
        if self.episode_times is not None:
            self.episode_times.add(self.now)
        commands = self.scheduler.handle(event, self.now)
        self.num_events += 1
        record = encode_record(self.now, event, commands)
        self.digest.add_encoded(record)
        if self.watch is not None:
            self.watch(record)
        if self.num_events % _CHECK_EVERY == 0:
            self._check_laws()
        for command in commands:
            self._carry_out(command)

    def _check_laws(self) -> None:
        try:
            check(self.scheduler, self.now)
        except LawViolation as violation:
            self.law_violations.append(f"at {self.now:.1f} s: {violation}")

    # Commands

    def _carry_out(self, command: c.Command) -> None:  # noqa: C901 (a case for each kind)
        fleet = self._fleet
        match command:
            case c.Generate():
                self._generate(command)
            case c.Abort() | c.HandOver():
                fleet.stop(command)
            case c.ForgetTokens():
                pass  # it is told with the next lease
            case c.PullWeights():
                fleet.pull(command)
            case c.ReleaseWorker():
                fleet.release(command.worker)
            case c.ForgetWorker():
                fleet.forget(command.worker)
            case c.StartTraining():
                fleet.switch(command.worker, "training")
            case c.StartGenerating():
                fleet.switch(command.worker, "generating")
            case c.Reshape():
                fleet.reshape(command)
            case c.AdviseFleet():
                fleet.hold(command.num_workers, command.let_go)
            case c.OpenRound():
                self._open_round(command)
            case c.AddGroup():
                self._add_group(command.step, command.group)
            case c.DropGroup():
                self._groups.pop(command.group, None)
            case c.Score():
                self._score(command)
            case c.CancelScore():
                self._scoring.pop(command.sample, None)
            case c.DeliverGroup():
                self._deliver(command)
            case c.CloseRound():
                self._trainer.close(command.step, command.num_groups)
            case c.EndData():
                self._trainer.end_data(command.step)
            case c.ReportStep():
                self._report_step(command.line)
            case c.AddAsked() | c.CloseAsked():
                raise LawViolation(f"the simulator has no clients that ask: {command}")
            case c.PlayEpisode() | c.AnswerCall() | c.StopEpisode() | c.ReleaseHost() | c.ForgetHost():
                self._tell_host(command)
            case _:
                assert_never(command)

    def _tell_host(self, command: HostCommand) -> None:
        match command:
            case c.PlayEpisode():
                domain, prompt, visit, _ = self._groups[group_of(command.sample)]
                key = (domain, prompt, visit, index_of(command.sample))
                self._hosts.begin(command, key, self._natural_length(command.sample))
            case c.AnswerCall():
                self._hosts.answer(command)
            case c.StopEpisode():
                self._hosts.stop(command)
            case c.ReleaseHost():
                self._hosts.release(command)
            case c.ForgetHost():
                self._hosts.forget(command)
            case _:
                assert_never(command)

    def _report_step(self, line: StepLine) -> None:
        self.lines.append(line)
        self.tokens_at_step.append(self._trainer.tokens_trained)
        if self.episode_times is not None:
            self.episode_times.end_step()
        self._check_laws()

    def _open_round(self, command: c.OpenRound) -> None:
        for group in command.groups:
            self._add_group(command.step, group)
        faults = self.scenario.faults
        if faults.kill_workers and command.step == faults.kill_step:
            for seconds in faults.kill_at_s:
                self._agenda.later(seconds, self._fleet.kill_some)

    def _add_group(self, step: Step, group: c.PlannedGroup) -> None:
        key = (group.domain, group.prompt)
        visit = self._visits.get(key, 0)
        self._visits[key] = visit + 1
        if self._epochs.get(key) == group.epoch:
            self._started_again[group.group] = None
        self._epochs[key] = group.epoch
        self._groups[group.group] = (group.domain, group.prompt, visit, step)

    def _generate(self, command: c.Generate) -> None:
        group = group_of(command.sample)
        domain, prompt, _, _ = self._groups[group]
        prompt_tokens = self._workload.prompt_tokens(domain, prompt)
        if self.scenario.domains[domain].environment is not None:
            self._generate_call(command, prompt_tokens)
            return
        total = self._natural_length(command.sample)
        self._fleet.generate(command, prompt_tokens=prompt_tokens, total_tokens=total, prefix=group)

    def _natural_length(self, sample: SampleId) -> int:
        """Return where a sample ends unless it is stopped, and count it when it is asked for the first time."""
        total = self._lengths.get(sample)
        if total is None:
            group = group_of(sample)
            domain, prompt, visit, step = self._groups[group]
            total = self._workload.answer_tokens(domain, prompt, visit, index_of(sample), step)
            self._lengths[sample] = total
            self.num_started += 1
            self.started_tokens += total
            if group not in self._started_again:
                self.num_natural += 1
                self.natural_tokens += total
        return total

    def _generate_call(self, command: c.Generate, prompt_tokens: int) -> None:
        episode = self._hosts.episodes[command.sample]
        call, script = episode.call, episode.script
        context_before = prompt_tokens + script.given_tokens(call - 1) + command.from_token
        reused = self._fleet.generate(
            command,
            prompt_tokens=prompt_tokens + script.given_tokens(call),
            total_tokens=script.ends[call],
            prefix=None if call else group_of(command.sample),
            is_call=True,
        )
        if call and command.from_token == script.start(call):
            self.reused_tokens += reused
            self.returned_tokens += context_before

    def _score(self, command: c.Score) -> None:
        domain, prompt, visit, _ = self._groups[group_of(command.sample)]
        index = index_of(command.sample)
        if self._lengths[command.sample] >= self.scenario.run.max_new_tokens:
            outcome, seconds, correct = "scored", _NO_ANSWER_S, False
        else:
            outcome, seconds, correct = self._rewards.outcome(
                domain, prompt, visit, index, command.attempt, command.timeout_s
            )
        self._scoring[command.sample] = command.attempt
        event = e.RewardFinished(command.sample, command.attempt, outcome, correct, seconds)
        self._agenda.later(seconds, lambda: self._scored(event))

    def _scored(self, event: e.RewardFinished) -> None:
        if self._scoring.get(event.sample) == event.attempt:
            del self._scoring[event.sample]
            self._correct[event.sample] = event.correct
            self.tell(event)

    def _deliver(self, command: c.DeliverGroup) -> None:
        domain, prompt, _, _ = self._groups.pop(command.group)
        prompt_tokens = self._workload.prompt_tokens(domain, prompt)
        for sample in command.samples:
            episode = self._hosts.episodes.get(sample)
            if episode is not None:
                self._correct[sample] = episode.correct
                self._lengths[sample] = episode.num_tokens + episode.given_tokens
        right = sum(self._correct[sample] for sample in command.samples)
        if self.scenario.trainer.filter_equal and right in (0, len(command.samples)):
            self._agenda.later(0.0, lambda: self._reject(command))
            return
        tokens = sum(self._lengths[sample] + prompt_tokens for sample in command.samples)
        self._trainer.deliver(command.step, command.group, len(command.samples), tokens)

    def _reject(self, command: c.DeliverGroup) -> None:
        self._trainer.reopen(command.step)
        self.tell(e.GroupRejected(command.group, "all its rewards are equal"))


def _away(round_: Round) -> str:
    """Say how many episodes of a round are with no worker."""
    if not round_.num_unhosted and not round_.num_playing:
        return ""
    return f", {round_.num_unhosted} wait for a host, {round_.num_playing} for their environment"
