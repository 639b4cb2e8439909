"""An adapter of a trainer that has nothing but the rules of README.md: each of them once, in plain Python.

It shows how an adapter looks, and that the figures of the cases come from the rules: nothing of PolyRL is in it.
"""

from collections import defaultdict
from collections.abc import Callable
from statistics import mean, stdev

from .adapter import FIXED_TOKENS, CaseCall, CaseEpisode, CaseSequence


class PlainServer:
    def __init__(self, draws: list[list[int]]) -> None:
        self._draws = iter(draws)
        self._calls: dict[str, list[CaseCall]] = {}

    def open(self, session: str) -> bool:
        is_free = session not in self._calls
        self._calls.setdefault(session, [])
        return is_free

    def ask(self, session: str, saw: list[int], retry: int) -> list[int] | None:
        if session not in self._calls:
            return None
        calls = self._calls[session]
        earlier = [call.drew for call in calls if call.saw == saw]
        if not (retry and earlier):
            calls.append(CaseCall(saw, next(self._draws)))
            return calls[-1].drew
        return earlier[-1]

    def close(self) -> dict[str, list[CaseCall]]:
        return self._calls


class PlainTrainer:
    def sequences(self, episodes: list[CaseEpisode]) -> list[list[CaseSequence] | None]:
        return [None if one.failed else _sequences(one) for one in episodes]

    def advantages(self, name: str, episodes: list[CaseEpisode]) -> list[float | None]:
        rewards: dict[int, list[float]] = defaultdict(list)
        for one in episodes:
            if not one.failed:
                rewards[one.group].append(one.reward)

        def over_mean(one: CaseEpisode) -> float:
            return one.reward - mean(rewards[one.group])

        def advantage(one: CaseEpisode) -> float:
            group = rewards[one.group]
            if name in ("grpo", "rloo") and len(group) == 1:
                return 0.0  # it has nobody to be compared with
            match name:
                case "dr_grpo":
                    return over_mean(one)
                case "grpo":
                    return over_mean(one) / (stdev(group) + 1e-6)
                case "rloo":
                    return over_mean(one) * len(group) / (len(group) - 1)
                case "reinforce_plus_plus":
                    return _whitened(one, episodes, lambda each: each.reward)
                case "reinforce_plus_plus_baseline":
                    return _whitened(one, episodes, over_mean)
                case _:
                    raise NotImplementedError(f"advantage {name}")

        return [None if one.failed else advantage(one) for one in episodes]

    def weights(self, aggregation: str, episodes: list[CaseEpisode]) -> list[list[list[float]] | None]:
        drawn = [0 if one.failed else _num_drawn(one) for one in episodes]
        num_episodes = sum(not one.failed for one in episodes)

        def weight(num_drawn: int) -> float:
            match aggregation:
                case "token-mean":
                    return 1 / sum(drawn)
                case "seq-mean-token-sum":
                    return 1 / num_episodes
                case "seq-mean-token-mean":
                    return 1 / num_episodes / num_drawn
                case "fixed":
                    return 1 / num_episodes / FIXED_TOKENS
                case _:
                    raise NotImplementedError(f"aggregation {aggregation}")

        return [
            None if one.failed else [[weight(num) * int(bit) for bit in each.trained] for each in _sequences(one)]
            for one, num in zip(episodes, drawn, strict=True)
        ]

    def mean_reward(self, episodes: list[CaseEpisode]) -> float:
        return mean(one.reward for one in episodes if not one.failed)


def _num_drawn(one: CaseEpisode) -> int:
    return sum(len(call.drew) for call in one.calls if call.paid)


def _whitened(one: CaseEpisode, episodes: list[CaseEpisode], number: Callable[[CaseEpisode], float]) -> float:
    """Subtract the mean over the step's drawn tokens, and divide by their standard deviation."""
    of_tokens = [number(each) for each in episodes if not each.failed for _ in range(_num_drawn(each))]
    return (number(one) - mean(of_tokens)) / (stdev(of_tokens) + 1e-6)


def _sequences(episode: CaseEpisode) -> list[CaseSequence]:
    found: list[CaseSequence] = []
    for saw, drew, _, paid in episode.calls:
        if not (drew and paid):
            continue
        begun = [each for each in found if saw[: len(each.tokens)] == each.tokens]
        longest = max(begun, key=lambda each: len(each.tokens), default=CaseSequence([], ""))
        given = len(saw) - len(longest.tokens)
        made = CaseSequence([*saw, *drew], longest.trained + "0" * given + "1" * len(drew))
        if begun:
            found[found.index(longest)] = made
        else:
            found.append(made)
    return found
