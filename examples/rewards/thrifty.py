"""A reward of whole conversations: a right answer with fewer letters is worth more."""

from polyrl import RewardInput

MOST_LETTERS = 24


def thrifty(given: RewardInput) -> dict[str, float]:
    played = given.episode
    assert played is not None, "this one is for episodes"
    letters = sum(len(call.drawn) for call in played.calls)
    saved = max(0.0, 1.0 - letters / MOST_LETTERS)
    return {"score": saved if played.reward > 0 else 0.0, "letters": letters, "calls": len(played.calls)}
