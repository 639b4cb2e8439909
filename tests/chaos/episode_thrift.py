"""A reward function of episodes: fewer calls and shorter answers are better. It sees the whole conversation."""

from polyrl import RewardInput


def thrift(given: RewardInput) -> dict[str, float]:
    assert given.episode is not None
    calls = given.episode.calls
    assert given.episode.parts["turns"] == len(calls)
    return {"calls": 1.0 / len(calls), "letters": 1.0 / (1 + sum(len(one.drawn) for one in calls))}
