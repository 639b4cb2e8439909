"""The hosts of environments, as the simulator plays them: they join, play episodes, make calls, die and come back.

It also keeps what a manager keeps of open episodes: which calls are answered. A call that is held complete, with the
prompt that it had, is answered from the record at once; one that is held in part goes on; at the first that differs the
later ones are thrown away.

Rules it keeps: an attempt that is over says nothing more, whatever its timers do. A host that dies takes its attempts
with it and nothing else. A host that hangs is there and none of its episodes moves any more, until it is given up or
dies. It leaves out messages that are lost on the way, and the load of a host: a tool takes as long as the scenario
says, however many there are.
"""

from collections.abc import Callable
from math import isinf

from msgspec import Struct

from polyrl.ids import HostName, Incarnation, SampleId
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.ledger import EpisodeOutcome
from polyrl.sim.draws import exponential, key_of
from polyrl.sim.environment_model import EnvironmentModel, EpisodeKey, EpisodeScript
from polyrl.sim.machines import Agenda
from polyrl.sim.scenario import Scenario

_DEATH_STREAM = 0x60
_HANG_STREAM = 0x61

Tell = Callable[[e.Event], None]
CountTokens = Callable[[SampleId], int]
"""Says how many drawn tokens of an episode have arrived."""


class SimEpisode(Struct):
    """An episode as the driver knows it, over all its attempts."""

    key: EpisodeKey
    script: EpisodeScript
    num_answered: int = 0
    """Calls that are held complete."""
    call: int = 0
    """The present call, or the last one."""
    num_tokens: int = 0
    """Drawn tokens of an episode that was scored."""
    correct: bool = False

    @property
    def given_tokens(self) -> int:
        """Tokens that tools added to what is trained of a scored episode."""
        return self.script.given_tokens(max(0, self.script.num_calls_within(self.num_tokens) - 1))


class SimHost:
    def __init__(self, name: HostName, incarnation: Incarnation, environment: str) -> None:
        self.name, self.incarnation, self.environment = name, incarnation, environment
        self.attempts: dict[SampleId, SimAttempt] = {}
        self.hangs = False


class SimAttempt:
    """An episode as its present host plays it."""

    def __init__(self, host: SimHost, sample: SampleId, number: int, fails_before: int | None) -> None:
        self.host, self.sample, self.number, self.fails_before = host, sample, number, fails_before

    @property
    def is_over(self) -> bool:
        return self.host.attempts.get(self.sample) is not self


class HostModel:
    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        agenda: Agenda,
        environments: EnvironmentModel,
        tell: Tell,
        count_tokens: CountTokens,
    ) -> None:
        self._section = scenario.hosts
        self._max_new_tokens, self._max_calls = scenario.run.max_new_tokens, scenario.environments.max_calls
        self._names = [domain.name for domain in scenario.domains if domain.environment is not None]
        self._seed = seed
        self._agenda = agenda
        self._environments = environments
        self._tell = tell
        self._count_tokens = count_tokens
        self._hosts: dict[HostName, SimHost] = {}
        self._lives: dict[HostName, int] = {}
        self.episodes: dict[SampleId, SimEpisode] = {}

    # Hosts

    def start(self) -> None:
        """Join all hosts, those of the environments by turns."""
        for number in range(1, self._section.processes + 1):
            for environment in self._names:
                self._join(HostName(f"{environment}-{number}"), environment)

    def _join(self, name: HostName, environment: str) -> None:
        life = self._lives.get(name, 0) + 1
        self._lives[name] = life
        host = self._hosts[name] = SimHost(name, Incarnation(life), environment)
        section = self._section
        self._tell(e.HostJoined(name, host.incarnation, environment, section.slots, section.price_usd_per_hour))
        if section.mean_life_s is not None:
            lives_s = exponential(section.mean_life_s, self._seed, _DEATH_STREAM, key_of(name), life)
            self._agenda.later(lives_s, lambda: self._leave(host, "its process died"))
        if section.mean_time_to_hang_s is not None:
            works_s = exponential(section.mean_time_to_hang_s, self._seed, _HANG_STREAM, key_of(name), life)
            self._agenda.later(works_s, lambda: self._hang(host))

    def _hang(self, host: SimHost) -> None:
        host.hangs = True

    def _leave(self, host: SimHost, reason: str) -> None:
        if self._hosts.get(host.name) is not host:
            return
        self._end(host)
        self._tell(e.HostLeft(host.name, host.incarnation, reason))

    def _end(self, host: SimHost) -> None:
        """End a process; another one takes its name and its place."""
        del self._hosts[host.name]
        host.attempts.clear()
        self._agenda.later(self._section.restart_s, lambda: self._join(host.name, host.environment))

    def release(self, command: c.ReleaseHost) -> None:
        host = self._hosts.get(command.host)
        if host is not None:
            self._agenda.later(0.0, lambda: self._leave(host, "it was released"))

    def forget(self, command: c.ForgetHost) -> None:
        host = self._hosts.get(command.host)
        if host is not None:
            self._end(host)

    # Episodes

    def begin(self, command: c.PlayEpisode, key: EpisodeKey, total_tokens: int) -> None:
        episode = self.episodes.get(command.sample)
        if episode is None:
            episode = SimEpisode(key, self._environments.script(key, total_tokens))
            self.episodes[command.sample] = episode
        host = self._hosts[command.host]
        fails = self._environments.fails_before(key, command.attempt, len(episode.script.ends))
        attempt = SimAttempt(host, command.sample, command.attempt, fails)
        host.attempts[command.sample] = attempt
        self._agenda.later(episode.script.begin_s, lambda: self._go_on(attempt, 0))

    def _go_on(self, attempt: SimAttempt, call: int) -> None:
        """Have an environment make its next move: a call, or its end."""
        if attempt.is_over or attempt.host.hangs:
            return
        episode = self.episodes[attempt.sample]
        if attempt.fails_before == call:
            self._finish(attempt, episode, "failed")
        elif call == len(episode.script.ends) or 0 < self._max_calls <= call:
            self._finish(attempt, episode, "scored")
        else:
            self._call(attempt, episode, call)

    def _call(self, attempt: SimAttempt, episode: SimEpisode, call: int) -> None:
        start = episode.script.start(call)
        held = max(start, self._count_tokens(attempt.sample))
        if call < episode.num_answered and not self._environments.is_the_same(episode.key, attempt.number, call):
            episode.num_answered = call
            held = start
        episode.call = call
        if call < episode.num_answered or held >= self._max_new_tokens:
            if call < episode.num_answered:
                self._tell(e.CallRepeated(attempt.sample, attempt.number))
            self._answered(attempt, episode)
        else:
            end = self._max_new_tokens
            self._tell(e.CallMade(attempt.sample, attempt.number, start, held, end))

    def answer(self, command: c.AnswerCall) -> None:
        attempt = self._find(command)
        if attempt is not None:
            self._answered(attempt, self.episodes[command.sample])

    def _answered(self, attempt: SimAttempt, episode: SimEpisode) -> None:
        call = episode.call
        episode.num_answered = max(episode.num_answered, call + 1)
        tool_s = episode.script.tools_s[call]
        if not isinf(tool_s):
            self._agenda.later(tool_s, lambda: self._go_on(attempt, call + 1))

    def _finish(self, attempt: SimAttempt, episode: SimEpisode, outcome: EpisodeOutcome) -> None:
        del attempt.host.attempts[attempt.sample]
        num_calls = len(episode.script.ends)
        episode.num_tokens = episode.script.start(min(self._max_calls or num_calls, num_calls))
        episode.correct = episode.script.correct
        self._tell(e.EpisodeEnded(attempt.sample, attempt.number, outcome, episode.num_tokens))

    def stop(self, command: c.StopEpisode) -> None:
        attempt = self._find(command)
        if attempt is not None:
            del attempt.host.attempts[command.sample]
        episode = self.episodes[command.sample]
        if command.num_tokens >= 0:
            episode.num_tokens = command.num_tokens
            episode.correct = False

    def _find(self, command: c.AnswerCall | c.StopEpisode) -> SimAttempt | None:
        host = self._hosts.get(command.host)
        attempt = None if host is None else host.attempts.get(command.sample)
        return None if attempt is None or attempt.number != command.attempt else attempt
