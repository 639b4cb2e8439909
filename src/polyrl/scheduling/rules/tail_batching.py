"""Tail batching: which prompts the next round starts. Prompts with long answers wait, together, for rare long rounds.

A SHORT round starts more prompts, and more samples of each, than the step needs, and keeps the first to end; prompts
that came too late are deferred. When every domain has enough deferred prompts, a LONG round takes the oldest, without
extras, and waits for every answer. With a factor of 1.25 that is four short rounds, then one long.

    off         every round takes what the step needs and waits for all of it
    race        the published rule: prompts race, and the samples of a prompt race (trains on order statistics: biased)
    prompts     only prompts race
    designated  extras run, but the samples to train are chosen before sampling; the extras only decide who is deferred
    predicted   short or long is chosen before sampling, from lengths of the prompt's earlier samples: no bias

An episode's length is its drawn tokens, or its time from beginning to end (`episode_length`): where tools take the
time, a round may wait for a task of few tokens.

Laws: a prompt is trained exactly once an epoch (or dropped with a reason); it is deferred at most once, since a long
round takes the oldest and defers none; at staleness 0 a domain never has as many deferred prompts as its share of a
step plus its extras. At the end of a domain's epoch, or when there are no extras any more, its deferred prompts are
drained by long rounds, the last one possibly smaller; a domain that has too few of them for a long round fills it with
fresh prompts.

With `bias_guard` a mode is left for a milder one (MILDER) at the end of a period whose trained answers were too short.
"""

import math

import msgspec
from msgspec import Struct

from polyrl.ids import PromptId, Step
from polyrl.scheduling.core.commands import RoundKind
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig
from polyrl.scheduling.rules.adaptive import Correlation
from polyrl.scheduling.rules.lengths import LengthModel
from polyrl.scheduling.rules.order import position_to_prompt

_HISTORY_GAIN = 0.5
MILDER = {"race": "prompts", "prompts": "off", "designated": "off"}
"""The mode for which the guard leaves each mode."""
_FEWEST_SAMPLES = 256
"""Trained samples from which the guard judges. Fewer have a mean that is off by chance."""


class Deferred(Struct):
    """A prompt that waits for a long round."""

    prompt: PromptId
    epoch: int
    times_deferred: int
    first_deferred_step: int


class Cursor(Struct):
    """How far a domain's data has been read: everything before `position` of `epoch`."""

    epoch: int = 0
    position: int = 0


class PlannedPrompt(Struct, frozen=True):
    """A prompt that a round starts."""

    domain: int
    prompt: PromptId
    epoch: int
    times_deferred: int
    first_deferred_step: int
    """-1 for a fresh prompt."""


class RoundPlan(Struct, frozen=True):
    kind: RoundKind
    choices: tuple[PlannedPrompt, ...]
    quotas: tuple[int, ...]
    num_samples: int
    num_passed_over: int
    """Fresh prompts that were deferred unsampled, being predicted long."""
    why: str


class Factors(Struct):
    """The over-provisioning in force; with `adaptive` it changes after every long round."""

    prompts: float
    samples: float


class TailBatching(Struct):
    factors: Factors
    cursors: list[Cursor]
    deferred: list[list[Deferred]]
    """By domain, oldest first."""
    history: dict[int, float] = msgspec.field(default_factory=dict)
    """Mean length of a prompt's earlier samples, by `prompt * num_domains + domain`; kept in predicted mode only."""
    means: LengthModel = msgspec.field(default_factory=LengthModel)
    """The length model of the values in `history` that are tokens."""
    mean_times: LengthModel = msgspec.field(default_factory=LengthModel)
    """Of those that are times, in hundredths of a second: those of domains that `is_timed`."""
    correlation: Correlation = msgspec.field(default_factory=Correlation)
    milder: str = ""
    """The mode that the guard chose; empty: the recipe's."""
    watched_tokens: int = 0
    watched_samples: int = 0
    """The samples that were trained since the guard judged last."""
    least_expected: float = math.inf
    """The least mean length expected since then: it is highest after a long round, and before the first one the longest
    answers are unknown."""


def in_force(config: RoundsConfig, state: TailBatching) -> RoundsConfig:
    """Return the configuration with the mode that the guard chose, if it chose one."""
    if not state.milder:
        return config
    return msgspec.structs.replace(config, tail_batching=state.milder, bias_guard=False)


def watch_bias(
    config: RoundsConfig, state: TailBatching, kind: str, num_tokens: int, num_samples: int, expected_mean: float
) -> str:
    """Count a trained round. At the end of a period, leave a mode whose trained answers are too short; return why."""
    if not config.bias_guard or not expected_mean:
        return ""
    state.watched_tokens += num_tokens
    state.watched_samples += num_samples
    state.least_expected = min(state.least_expected, expected_mean)
    if kind != "long" or state.watched_samples < _FEWEST_SAMPLES:
        return ""
    bias = 1.0 - state.watched_tokens / state.watched_samples / state.least_expected
    state.watched_tokens, state.watched_samples, state.least_expected = 0, 0, math.inf
    mode = in_force(config, state).tail_batching
    if bias <= config.max_bias or mode not in MILDER:
        return ""
    state.milder = MILDER[mode]
    return (
        f"rounds.tail_batching: from {mode} to {state.milder}: the answers that it trains are {bias:.0%} shorter than "
        f"answers are, above rounds.max_bias={config.max_bias:g}"
    )


def is_timed(config: RoundsConfig, domain: DomainData) -> bool:
    """Return whether a sample of the domain is long by its time, and not by its tokens."""
    return bool(domain.environment) and config.episode_length == "seconds"


def start(config: RoundsConfig, num_domains: int) -> TailBatching:
    return TailBatching(
        factors=Factors(prompts=config.prompt_factor, samples=config.sample_factor),
        cursors=[Cursor() for _ in range(num_domains)],
        deferred=[[] for _ in range(num_domains)],
    )


def num_samples_of(config: RoundsConfig, factors: Factors, kind: RoundKind) -> int:
    """Return the number of samples that a prompt of such a round starts."""
    extras = kind == "short" and config.tail_batching in ("race", "designated")
    return math.ceil(factors.samples * config.samples_per_prompt) if extras else config.samples_per_prompt


def num_extra(config: RoundsConfig, factors: Factors, quota: int) -> int:
    """Prompts that a short round starts beyond a domain's quota (in predicted mode: passes over)."""
    return 0 if config.tail_batching == "off" else math.ceil(factors.prompts * quota) - quota


class Planner:
    """Plans rounds over a TailBatching state. Holds nothing of its own."""

    def __init__(
        self, config: RoundsConfig, domains: tuple[DomainData, ...], seed: int, num_epochs: int | None
    ) -> None:
        self.config = config
        self.domains = domains
        self.seed = seed
        self.num_epochs = num_epochs

    def plan_round(self, state: TailBatching, step: Step) -> RoundPlan | None:
        """Plan the next round; return None at the end of the data. Advances the cursors; takes prompts out of
        `deferred`."""
        for domain in range(len(self.domains)):
            self._begin_epoch_if_due(state, domain)
        if not any(self._is_due(state, domain) for domain in range(len(self.domains))):
            return None
        why = self._why_long(state)
        if why is not None:
            return self._long(state, step, why)
        plan = self._short(state, step)
        if plan.choices:
            return plan
        why = "every prompt left in the epoch is predicted to be long"
        return msgspec.structs.replace(self._long(state, step, why), num_passed_over=plan.num_passed_over)

    def next_kind(self, state: TailBatching) -> RoundKind:
        """Return the kind of the next round, as far as it is known before it is planned."""
        return "short" if self._why_long(state) is None else "long"

    def _why_long(self, state: TailBatching) -> str | None:
        for d, domain in enumerate(self.domains):
            if state.deferred[d] and self._is_draining(state, d):
                return f"{domain.name} defers no more: its queue is drained"
        full = all(
            len(state.deferred[d]) >= domain.prompts_per_step or not self._is_due(state, d)
            for d, domain in enumerate(self.domains)
        )
        if full and in_force(self.config, state).tail_batching != "off":
            return "every domain has a step's share of deferred prompts"
        return None

    def take_fresh(self, state: TailBatching, domain: int) -> PlannedPrompt | None:
        """Return the next fresh prompt of a domain's epoch, or None when there is none left."""
        if self._num_fresh(state, domain) == 0:
            return None
        cursor = state.cursors[domain]
        prompt = position_to_prompt(
            cursor.position, num_prompts=self.domains[domain].num_prompts, seed=self.seed + domain, epoch=cursor.epoch
        )
        cursor.position += 1
        return PlannedPrompt(domain, prompt, cursor.epoch, 0, -1)

    def defer(self, state: TailBatching, choice: PlannedPrompt, step: Step) -> None:
        """Put a prompt that did not get its place behind the others of its domain."""
        first = step if choice.first_deferred_step < 0 else choice.first_deferred_step
        state.deferred[choice.domain].append(Deferred(choice.prompt, choice.epoch, choice.times_deferred + 1, first))

    def remember(self, state: TailBatching, domain: int, prompt: PromptId, mean: float) -> None:
        """Keep a trained prompt's mean length for the next epoch's prediction: tokens, or hundredths of a second."""
        if self.config.tail_batching != "predicted":
            return
        key = prompt * len(self.domains) + domain
        known = state.history.get(key)
        state.history[key] = mean if known is None else known + _HISTORY_GAIN * (mean - known)
        self._means_of(state, domain).observe(round(mean), finished=True)

    def _means_of(self, state: TailBatching, domain: int) -> LengthModel:
        return state.mean_times if is_timed(self.config, self.domains[domain]) else state.means

    def _begin_epoch_if_due(self, state: TailBatching, domain: int) -> None:
        cursor = state.cursors[domain]
        exhausted = cursor.position >= self.domains[domain].num_prompts and not state.deferred[domain]
        if exhausted and (self.num_epochs is None or cursor.epoch + 1 < self.num_epochs):
            cursor.epoch += 1
            cursor.position = 0

    def _num_fresh(self, state: TailBatching, domain: int) -> int:
        return self.domains[domain].num_prompts - state.cursors[domain].position

    def _is_draining(self, state: TailBatching, domain: int) -> bool:
        """Return whether deferred prompts should not wait for more of their kind: none will come."""
        no_extras = num_extra(in_force(self.config, state), state.factors, self.domains[domain].prompts_per_step) == 0
        return no_extras or self._num_fresh(state, domain) == 0

    def _is_due(self, state: TailBatching, domain: int) -> bool:
        return self._num_fresh(state, domain) > 0 or bool(state.deferred[domain])

    def _long(self, state: TailBatching, step: Step, why: str) -> RoundPlan:
        choices: list[PlannedPrompt] = []
        quotas: list[int] = []
        for d, domain in enumerate(self.domains):
            taken = self._take_deferred(state, d, domain.prompts_per_step)
            while len(taken) < domain.prompts_per_step and (fresh := self.take_fresh(state, d)) is not None:
                taken.append(fresh)
            choices += taken
            quotas.append(len(taken))
        num_samples = num_samples_of(self.config, state.factors, "long")
        return RoundPlan("long", tuple(choices), tuple(quotas), num_samples, 0, why)

    def _take_deferred(self, state: TailBatching, domain: int, num: int) -> list[PlannedPrompt]:
        """Take the oldest deferred prompts."""
        waiting = state.deferred[domain]
        state.deferred[domain] = waiting[num:]
        return [
            PlannedPrompt(domain, one.prompt, one.epoch, one.times_deferred, one.first_deferred_step)
            for one in waiting[:num]
        ]

    def _short(self, state: TailBatching, step: Step) -> RoundPlan:
        choices: list[PlannedPrompt] = []
        quotas: list[int] = []
        num_passed_over = 0
        config = in_force(self.config, state)
        for d, domain in enumerate(self.domains):
            quota = domain.prompts_per_step
            # A domain that waits for the others to fill up takes no extras: its queue must not outgrow its share.
            extra = num_extra(config, state.factors, quota) if len(state.deferred[d]) < quota else 0
            if self.config.tail_batching == "predicted":
                taken, passed = self._take_predicted_short(state, d, quota, extra, step)
                num_passed_over += passed
            else:
                taken = self._take_fresh_many(state, d, quota + extra)
            choices += taken
            quotas.append(min(quota, len(taken)))
        num_samples = num_samples_of(config, state.factors, "short")
        extras = len(choices) - sum(quotas)
        why = (
            f"{extras} prompts more than the step needs, {num_samples} samples each"
            if extras
            else "what the step needs"
        )
        return RoundPlan("short", tuple(choices), tuple(quotas), num_samples, num_passed_over, why)

    def _take_fresh_many(self, state: TailBatching, domain: int, num: int) -> list[PlannedPrompt]:
        taken: list[PlannedPrompt] = []
        while len(taken) < num and (fresh := self.take_fresh(state, domain)) is not None:
            taken.append(fresh)
        return taken

    def _take_predicted_short(
        self, state: TailBatching, domain: int, quota: int, max_passed: int, step: Step
    ) -> tuple[list[PlannedPrompt], int]:
        """Take `quota` prompts, passing over (deferring unsampled) up to `max_passed` that are predicted to be long."""
        threshold = self._means_of(state, domain).quantile(1.0 / state.factors.prompts)
        taken: list[PlannedPrompt] = []
        passed = 0
        while len(taken) < quota and (fresh := self.take_fresh(state, domain)) is not None:
            expected = state.history.get(fresh.prompt * len(self.domains) + domain)
            if passed < max_passed and expected is not None and expected > threshold:
                self.defer(state, fresh, step)
                passed += 1
            else:
                taken.append(fresh)
        return taken, passed
