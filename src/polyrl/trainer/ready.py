"""Prepares samples for the loss: rewards and their penalties, what is scored beforehand, and advantages.

`prepare` handles samples as they arrive and needs no others. `with_advantages` compares them: the samples of a group
with each other or, where the advantage needs it (`needs_step`), all samples of the step. The advantages of `gae` are
per token, from a critic's values, and whitened over the step's trained tokens.

A sample that is an episode may be several training sequences. It is compared once, with its own reward, less the KL
of all of its drawn tokens if the reward pays for it. Its tokens follow one another in the order of calls, across
sequences.

Left out: which groups there are (filters run earlier), and the loss.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.batch import (
    Logprobs,
    TrainGroup,
    TrainSample,
    is_masked,
    number_episodes,
    shaped_reward,
    without,
)
from polyrl.trainer.critic import Critic
from polyrl.trainer.guard import MismatchGuard
from polyrl.trainer.model import Policy, Scorer
from polyrl.trainer.objectives import gae, kl
from polyrl.trainer.objectives.advantages import above_the_optimal, whiten
from polyrl.trainer.objectives.registry import RewardBatch, checked_advantages, find_advantage, find_batch_advantage
from polyrl.trainer.packing import Pack, make_parts, num_rows, plan_passes
from polyrl.trainer.ranks import ALONE, Peers

Tensor = torch.Tensor
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Ready(NamedTuple):
    """A training sequence, with everything that its loss needs besides the model."""

    sample: TrainSample
    is_masked: bool
    """Whether its episode counts in its siblings' advantages but is not trained on."""
    reward: float
    """The episode's reward minus the length penalty. The KL penalty is not subtracted yet."""
    number: int
    """The number of its episode in the step, in order of arrival."""
    num_episode_tokens: int
    """The number of drawn tokens of its episode."""
    is_first: bool
    """Whether it is the first sequence of its episode, which counts for the episode in denominators."""
    kl: Floats | None = None
    """The KL estimate of each token, where the reward pays for it."""
    reference: Logprobs | None = None
    """Log-probabilities by the reference, if scored beforehand."""
    values: Floats | None = None
    """The critic's values at the step's start."""
    returns: Floats | None = None
    """The critic's regression targets, once they are known."""
    gains: Floats | None = None
    """The advantage of each token, once it is known."""
    pull: float | None = None
    """The square of the gradient that its episode gives with an advantage of 1, for the optimal baseline."""


ReadyEpisode = Sequence[Ready]
"""The sequences of one episode, in the order of their first calls."""


class Preparation:
    """Prepares the samples of a step. `beforehand`: the reference scores them as they arrive, not in each pass."""

    def __init__(
        self,
        policy: Policy,
        config: AlgorithmConfig,
        *,
        max_tokens: int,
        max_new_tokens: int,
        temperature: float,
        reference: Scorer | None,
        critic: Critic | None,
        beforehand: bool,
        peers: Peers = ALONE,
    ) -> None:
        self._policy, self._config, self._reference = policy, config, reference
        self._max_tokens, self._max_new_tokens, self._temperature = max_tokens, max_new_tokens, temperature
        self._beforehand, self._critic, self._peers = beforehand, critic, peers
        self._of_step = None if critic else find_batch_advantage(config.advantage, config.advantage_args)
        self._of_group = None
        if not critic and not self._of_step:
            self._of_group = find_advantage(config.advantage, config.advantage_args)

    @property
    def needs_step(self) -> bool:
        """Whether advantages are known only after the step's last sample."""
        return self._of_group is None

    # Sample by sample

    def look_at(self, groups: Sequence[TrainGroup], guard: MismatchGuard, first: int) -> list[list[TrainSample]]:
        """Score samples with the step's starting weights, and leave out those that the guard finds. This is the time to
        score them: the weights will have moved when they are trained. `first` is the number of the first episode."""
        samples = [sample for group in groups for sample in group]
        if self._config.old_logprobs != "engine":
            samples = self.with_old_logprobs(samples)
            ours = [one.old_logprobs for one in samples if one.old_logprobs is not None]
        else:
            ours = [] if guard.is_over else self.logprobs(self._policy, samples)
        if ours:
            theirs = [one.logprobs for one in samples]
            mine, its = (torch.from_numpy(np.concatenate(numbers)) for numbers in (ours, theirs))
            guard.look(mine, its, samples, [one for group in number_episodes(groups, first) for one in group])
        known = iter(samples)
        return without([[next(known) for _ in group] for group in groups], guard.found()[0], first)

    def prepare(self, groups: Sequence[TrainGroup], first: int = 0) -> list[list[Ready]]:
        """Score what has to be scored beforehand. `first` is the number of the first episode."""
        samples = [sample for group in groups for sample in group]
        references: Sequence[Logprobs | None] = [None] * len(samples)
        if self._reference is not None and (self._beforehand or self._config.kl == "reward"):
            references = self.logprobs(self._reference, samples)
        apart: Sequence[Floats | None] = [None] * len(samples)
        if self._config.kl == "reward":
            apart = [self._apart(*pair) for pair in zip(self._olds(samples), references, strict=True)]
        values: Sequence[Floats | None] = [None] * len(samples)
        if self._critic is not None:
            values = self.of_answers(self._critic.values_only, samples)
        ready = (
            one._replace(kl=its_kl, reference=reference, values=its_values)
            for one, its_kl, reference, its_values in zip(
                self._unscored(groups, first), apart, references, values, strict=True
            )
        )
        return [[next(ready) for _ in group] for group in groups]

    def _unscored(self, groups: Sequence[TrainGroup], first: int) -> Iterator[Ready]:
        """Yield every sequence with what is known of its episode without a model."""
        for group, numbers in zip(groups, number_episodes(groups, first), strict=True):
            lengths: dict[int, int] = {}
            for sample, number in zip(group, numbers, strict=True):
                lengths[number] = lengths.get(number, 0) + sample.num_drawn
            unseen = set(numbers)
            for sample, number in zip(group, numbers, strict=True):
                length = lengths[number]
                reward = shaped_reward(sample.reward, length, self._config, self._max_new_tokens)
                yield Ready(sample, is_masked(sample, self._config), reward, number, length, number in unseen)
                unseen.discard(number)

    def with_old_logprobs(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """Return the samples with old log-probabilities. Samples that already have some keep them."""
        lacking = [number for number, one in enumerate(samples) if one.old_logprobs is None]
        scored = list(samples)
        found = self.logprobs(self._policy, [samples[number] for number in lacking])
        for number, logprobs in zip(lacking, found, strict=True):
            scored[number] = samples[number]._replace(old_logprobs=logprobs)
        return scored

    def logprobs(self, policy: Scorer, samples: Sequence[TrainSample]) -> list[Logprobs]:
        """Return the log-probabilities of every sample's drawn tokens, without gradients."""
        return self.of_answers(lambda pack: policy.score_only(pack, self._temperature).logprobs, samples)

    def of_answers(self, score: Callable[[Pack], Tensor], samples: Sequence[TrainSample]) -> list[Floats]:
        """Return what a model gives for each drawn token, sequence by sequence."""
        found: list[Floats] = [np.zeros(0, np.float32)] * len(samples)
        passes = plan_passes(num_rows(samples), self._max_tokens, self._peers.size)
        mine: list[int] = []
        for pack, is_spare in make_parts(samples, passes, self._peers.rank):
            numbers = score(pack).cpu().numpy()
            if is_spare:
                continue
            ends = np.cumsum(pack.num_drawn_tokens)[:-1]
            for number, part in zip(pack.samples, np.split(numbers, ends), strict=True):
                found[number] = part
                mine.append(number)
        return found if self._peers.size == 1 else self._complete(found, mine)

    def _complete(self, found: list[Floats], mine: list[int]) -> list[Floats]:
        """Fill in the results of the other ranks."""
        told = msgspec.msgpack.encode({number: found[number].tobytes() for number in mine})
        for theirs in self._peers.exchange(told):
            for number, data in msgspec.msgpack.decode(theirs, type=dict[int, bytes]).items():
                found[number] = np.frombuffer(bytearray(data), np.float32)
        return found

    def _olds(self, samples: Sequence[TrainSample]) -> list[Logprobs]:
        """Return the log-probabilities that the KL penalty in the reward is measured from.

        With one update the importance ratio does not use them: the pass that trains makes it exactly 1. Other packs
        round differently, in bfloat16 by more than GSPO's clip for one sample in six.
        """
        if self._config.old_logprobs == "engine":
            return [one.logprobs for one in samples]
        known = self.with_old_logprobs(samples)
        return [one.old_logprobs for one in known if one.old_logprobs is not None]

    def _apart(self, old: Logprobs, reference: Logprobs | None) -> Floats:
        assert reference is not None, "scored above"
        return kl.estimate(torch.from_numpy(old), torch.from_numpy(reference), self._config.kl_estimator).numpy()

    # Advantages

    def with_advantages(self, groups: Sequence[Sequence[Ready]]) -> list[list[Ready]]:
        """Return whole groups with their advantages. If `needs_step`, the groups must be all groups of the step."""
        if self._of_group is None:
            return self._of_all(groups)
        name = self._config.advantage
        compared: list[list[Ready]] = []
        for group in groups:
            episodes = episodes_of(group)
            rewards = torch.tensor([self._total(one) for one in episodes], dtype=torch.float64)
            pulls = [one[0].pull for one in episodes if one[0].pull is not None]
            found = self._of_group(rewards, self._config)
            if pulls:
                found = above_the_optimal(rewards, torch.tensor(pulls, dtype=torch.float64), self._config)
            gains = checked_advantages(found, len(episodes), name, "a group").tolist()
            of_episode = {one[0].number: gain for one, gain in zip(episodes, gains, strict=True)}
            compared.append(
                [one._replace(gains=np.full(one.sample.num_drawn, of_episode[one.number], np.float32)) for one in group]
            )
        return compared

    def _of_all(self, groups: Sequence[Sequence[Ready]]) -> list[list[Ready]]:
        """Compute the advantage of each token of the step, and give every sequence its own."""
        by_group = [episodes_of(group) for group in groups]
        episodes = [one for group in by_group for one in group]
        if not episodes:
            return [[] for _ in groups]
        if self._critic is not None:
            episodes, gains = self._by_critic(episodes)
        else:
            gains = self._by_step(episodes, [len(group) for group in by_group])
        ends = np.cumsum([one[0].num_episode_tokens for one in episodes])[:-1]
        parts = np.split(gains.numpy().astype(np.float32), ends)
        found: dict[int, Iterator[Ready]] = {
            episode[0].number: iter(
                [one._replace(gains=mine) for one, mine in zip(episode, split(part, episode), strict=True)]
            )
            for episode, part in zip(episodes, parts, strict=True)
        }
        return [[next(found[one.number]) for one in group] for group in groups]

    def _by_critic(self, episodes: Sequence[ReadyEpisode]) -> tuple[list[ReadyEpisode], Tensor]:
        """Return the episodes with the critic's targets, and the whitened advantages."""
        critic, gains, taught = self._config.critic, [], []
        for episode in episodes:
            values = join([one.values for one in episode if one.values is not None], episode)
            its_gains, returns = gae.estimate(
                self._rewards(episode), values.astype(np.float64), critic.gamma, critic.gae_lambda
            )
            gains.append(its_gains)
            parts = split(returns.astype(np.float32), episode)
            taught.append([one._replace(returns=part) for one, part in zip(episode, parts, strict=True)])
        return taught, whiten(torch.from_numpy(np.concatenate(gains)), _trained_tokens(episodes))

    def _by_step(self, episodes: Sequence[ReadyEpisode], sizes: Sequence[int]) -> Tensor:
        assert self._of_step is not None
        lengths = torch.tensor([one[0].num_episode_tokens for one in episodes])
        kept = torch.tensor([not one[0].is_masked for one in episodes])
        batch = RewardBatch(
            rewards=torch.tensor([self._total(one) for one in episodes], dtype=torch.float64),
            group=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
            num_tokens=lengths * kept,
            to_come=torch.from_numpy(np.concatenate([self._rewards(one)[::-1].cumsum()[::-1] for one in episodes])),
            is_trained=_trained_tokens(episodes),
        )
        num_tokens = len(batch.to_come)
        found = self._of_step(batch, self._config)
        gains = checked_advantages(found, len(episodes), self._config.advantage, "a step", num_tokens)
        return gains if len(gains) == num_tokens else gains.repeat_interleave(lengths)

    def _rewards(self, episode: ReadyEpisode) -> gae.Doubles:
        """Return the reward of each token: the episode's own at its last token, minus any KL penalty at each."""
        rewards = np.zeros(episode[0].num_episode_tokens)
        apart = [one.kl for one in episode if one.kl is not None]
        if apart:
            rewards -= self._config.kl_coef * join(apart, episode)
        rewards[-1] += episode[0].reward
        return rewards

    def _total(self, episode: ReadyEpisode) -> float:
        return episode[0].reward if episode[0].kl is None else float(self._rewards(episode).sum())


def episodes_of(group: Sequence[Ready]) -> list[ReadyEpisode]:
    """Return the episodes of a group, each as its sequences, ordered by their first ones."""
    found: dict[int, list[Ready]] = {}
    for one in group:
        found.setdefault(one.number, []).append(one)
    return list(found.values())


def join(parts: Sequence[Floats], episode: ReadyEpisode) -> Floats:
    """Return numbers of the drawn tokens of each sequence as numbers of the episode's tokens, in the order of calls."""
    if len(parts) == 1:
        return parts[0]
    joined = np.empty(episode[0].num_episode_tokens, parts[0].dtype)
    for part, one in zip(parts, episode, strict=True):
        joined[one.sample.order] = part
    return joined


def split(numbers: Floats, episode: ReadyEpisode) -> list[Floats]:
    """Return the opposite of `join`: the numbers of each sequence."""
    return [numbers] if len(episode) == 1 else [numbers[one.sample.order] for one in episode]


def _trained_tokens(episodes: Sequence[ReadyEpisode]) -> Tensor:
    """Return (tokens,) int64: 1, or 0 for the tokens of masked episodes."""
    return torch.from_numpy(
        np.concatenate([np.full(one[0].num_episode_tokens, not one[0].is_masked, np.int64) for one in episodes])
    )
