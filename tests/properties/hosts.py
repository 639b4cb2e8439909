"""A hostile world with environments: hosts die, drain, hang and lie between any two calls of their episodes.

It plays on the machines of hostile.py. Laws of the state are checked after every event; what was said is held against
what was told here: an episode is delivered only with a reward that its host gave in the attempt that was under way, no
token is counted that was not drawn, and calls are answered once.
"""

import random
from typing import Any

import msgspec

from polyrl.errors import LawViolation
from polyrl.ids import HostName, Incarnation, SampleId, group_of
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import EnvironmentRules, SchedulerConfig
from polyrl.scheduling.scheduler import Scheduler
from tests.properties.hostile import HostileWorld

ENVIRONMENTS = ("maze", "shop")


def with_environments(config: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    """Make at least one domain of episodes."""
    domains = [
        msgspec.structs.replace(
            domain,
            environment=ENVIRONMENTS[number] if number == 0 or rng.random() < 0.5 else "",
            scores_episodes=rng.random() < 0.5,
        )
        for number, domain in enumerate(config.domains)
    ]
    rules = EnvironmentRules(
        turn_timeout_s=rng.choice([3.0, 30.0]),
        learn_turn_timeouts=rng.random() < 0.7,
        learn_episode_timeouts=rng.random() < 0.7,
        least_turn_timeout_s=rng.choice([0.5, 5.0]),
        episode_timeout_s=rng.choice([10.0, 200.0]),
        max_attempts=rng.randint(1, 3),
        drain_timeout_s=rng.choice([2.0, 50.0]),
    )
    return msgspec.structs.replace(config, domains=tuple(domains), environments=rules)


class HostProcess:
    def __init__(self, name: HostName, incarnation: Incarnation, environment: str) -> None:
        self.name, self.incarnation, self.environment = name, incarnation, environment
        self.episodes: dict[SampleId, Play] = {}


class Play:
    """An attempt at an episode, as its host knows it."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.num_calls = 0
        self.is_waiting = False
        """A call is made, and not answered."""


class NoBooks:
    """What hostile.py's books say of single answers does not hold for episodes; the world below has its own."""

    def before(self, *_: Any) -> None:
        pass

    def after(self, *_: Any) -> None:
        pass


class EpisodeWorld(HostileWorld):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.host_rng = random.Random(seed + 90)
        self.config = with_environments(self.config, self.host_rng)
        self.scheduler = Scheduler(self.config)
        self.books = NoBooks()  # type: ignore[assignment]
        self.hosts: dict[HostName, HostProcess] = {}
        self.host_lives: dict[HostName, int] = {}
        self.drawn: dict[SampleId, int] = {}
        """Tokens of complete calls, as the driver holds them."""
        self.rewarded: set[SampleId] = set()
        self.judged: set[SampleId] = set()
        """Those that the trainer has scored too."""

    # Hosts

    def malice(self) -> None:
        self.trouble_with_hosts()
        super().malice()

    def trouble_with_hosts(self) -> None:
        rng = self.host_rng
        draw = rng.random()
        if draw < 0.04 or not self.hosts:
            self.join_host()
        elif draw < 0.06:
            host = self.hosts.pop(rng.choice(list(self.hosts)))
            self.tell(e.HostLeft(host.name, host.incarnation, "it was killed"))
        elif draw < 0.07:
            host = rng.choice(list(self.hosts.values()))
            self.tell(e.HostDrainRequested(host.name, host.incarnation, "a person asked"))
        elif draw < 0.08:
            host = rng.choice(list(self.hosts.values()))
            self.tell(e.HostLeft(host.name, Incarnation(host.incarnation - 1), "old news"))
        elif draw < 0.14:
            sample = SampleId(rng.choice([*self.drawn, 0, 1 << 40]))
            nonsense = (rng.choice([-1, 0, 99]), *(rng.choice([-3, 0, 1, 5, 1 << 50]) for _ in range(3)))
            self.tell(e.CallMade(sample, *nonsense))  # of an attempt that is not under way
            self.tell(e.CallRepeated(sample, nonsense[0]))
        elif draw < 0.6:
            self.play_on(rng.choice(list(self.hosts.values())))

    def join_host(self) -> None:
        rng = self.host_rng
        name = HostName(f"h{rng.randrange(4)}")
        life = self.host_lives[name] = self.host_lives.get(name, 0) + 1
        environment = rng.choice(ENVIRONMENTS)
        self.hosts[name] = HostProcess(name, Incarnation(life), environment)
        self.tell(e.HostJoined(name, Incarnation(life), environment, rng.choice([1, 2, 20]), 1.0))

    def play_on(self, host: HostProcess) -> None:
        """Its environments act: each ends, fails, makes a call, or thinks about it."""
        rng = self.host_rng
        for sample, play in list(host.episodes.items()):
            if sample not in host.episodes:  # an event before has ended it
                continue
            draw = 0.5 + rng.random() / 2 if self.fair else rng.random()
            if play.is_waiting:
                if draw < 0.05:
                    self.end(host, sample, "scored")  # it waits for the answer no longer
            elif draw < 0.1:
                self.end(host, sample, "failed")
            elif draw < 0.15:
                self.tell(e.CallRepeated(sample, play.attempt))
            elif draw < 0.4:
                continue
            elif play.num_calls and draw < 0.7:
                self.end(host, sample, "scored")
            else:
                self.call(host, sample, play)

    def call(self, host: HostProcess, sample: SampleId, play: Play) -> None:
        known = self.scheduler.desk.samples[sample]
        held = self.drawn.get(sample, 0)
        start = self.host_rng.choice([held, held, held, 0])
        if start >= self.config.max_new_tokens:
            self.end(host, sample, "scored")
            return
        play.num_calls += 1
        play.is_waiting = True
        partial = known.num_tokens if start == held else start
        end = max(partial + 1, start + self.host_rng.randint(1, self.config.max_new_tokens))
        if partial >= self.config.max_new_tokens:
            partial = start
        self.drawn[sample] = start
        self.lengths[sample] = self.host_rng.randint(partial + 1, min(end, self.config.max_new_tokens))
        self.tell(e.CallMade(sample, play.attempt, start, partial, end))

    def end(self, host: HostProcess, sample: SampleId, outcome: Any) -> None:
        play = host.episodes.pop(sample)
        num_tokens = self.drawn.get(sample, 0)
        if outcome == "scored" and num_tokens:
            self.rewarded.add(sample)
        self.tell(e.EpisodeEnded(sample, play.attempt, outcome, num_tokens))

    # Carrying out

    def carry_out(self, command: c.Command) -> None:  # noqa: C901 (a case for each kind)
        match command:
            case c.PlayEpisode():
                self.begin(command)
            case c.AnswerCall():
                self.answer(command)
            case c.StopEpisode():
                host = self.hosts.get(command.host)
                if host is not None:
                    host.episodes.pop(command.sample, None)
                if command.num_tokens >= 0:
                    self.rewarded.add(command.sample)
                    self.drawn[command.sample] = command.num_tokens
            case c.ReleaseHost():
                host = self.hosts.pop(command.host, None)
                if host is not None and host.episodes:
                    raise LawViolation(f"host {host.name} was released with episodes")
                if host is not None:
                    self.news.append(e.HostLeft(host.name, host.incarnation, "it was released"))
            case c.ForgetHost():
                self.hosts.pop(command.host, None)
            case c.DeliverGroup():
                domain = self.config.domains[self.scheduler.desk.groups[command.group].domain]
                for one in command.samples if domain.environment else ():
                    if one not in self.rewarded or (domain.scores_episodes and one not in self.judged):
                        raise LawViolation(f"episode {one} was delivered without a reward")
                    if self.scheduler.desk.samples[one].num_tokens != self.drawn[one]:
                        raise LawViolation(f"episode {one} was delivered with tokens that nobody received")
                super().carry_out(command)
            case c.Generate() if self.is_episode(command.sample) and command.sample in self.lengths:
                self.lengths[command.sample] = min(self.lengths[command.sample], command.max_tokens)
                super().carry_out(command)
            case c.Score() if self.is_episode(command.sample):
                domain = self.config.domains[self.scheduler.desk.groups[group_of(command.sample)].domain]
                if not domain.scores_episodes or command.sample not in self.rewarded:
                    raise LawViolation("an episode was sent to be scored that is final, or has not ended")
                if command.attempt > self.config.rewards.max_attempts:
                    raise LawViolation("attempts at an episode count as attempts at its reward")
                super().carry_out(command)
            case _:
                super().carry_out(command)

    def tell(self, event: e.Event) -> None:
        if isinstance(event, e.RewardFinished) and event.outcome not in ("infrastructure_failed", "no_reward"):
            self.judged.add(event.sample)
        super().tell(event)

    def is_episode(self, sample: SampleId) -> bool:
        group = self.scheduler.desk.groups.get(group_of(sample))
        return group is not None and group.domain >= 0 and bool(self.config.domains[group.domain].environment)

    def begin(self, command: c.PlayEpisode) -> None:
        host = self.hosts.get(command.host)
        if any(command.sample in one.episodes for one in self.hosts.values()):
            raise LawViolation(f"episode {command.sample} is played twice")
        if host is not None:
            host.episodes[command.sample] = Play(command.attempt)

    def answer(self, command: c.AnswerCall) -> None:
        known = self.scheduler.desk.samples[command.sample]
        self.drawn[command.sample] = known.num_tokens
        host = self.hosts.get(command.host)
        play = None if host is None else host.episodes.get(command.sample)
        if play is not None and play.attempt == command.attempt:
            if not play.is_waiting:
                raise LawViolation(f"a call of episode {command.sample} was answered twice")
            play.is_waiting = False

    def be_fair(self) -> None:
        for environment in ENVIRONMENTS:
            name = HostName(f"fair-{environment}")
            self.hosts[name] = HostProcess(name, Incarnation(1), environment)
            self.tell(e.HostJoined(name, Incarnation(1), environment, 8, 1.0))
        super().be_fair()

    def heartbeats(self) -> None:
        super().heartbeats()
        if self.fair:
            for host in list(self.hosts.values()):
                self.play_on(host)
