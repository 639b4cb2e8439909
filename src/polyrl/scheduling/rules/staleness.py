"""Staleness: which weight version may write tokens for which step.

Step t is trained on tokens of version t - k at the oldest, where k is `max_staleness`; 0 is strictly on-policy. The
rule is kept by pace, never by discarding: a round opens only when the newest published version is fresh enough for all
of it, at most k + 1 rounds are open at once, and a worker takes a sample only when the version it holds is. Tokens that
exist are therefore never too old.
"""

from polyrl.ids import Step, Version


def oldest_version(step: Step, max_staleness: int) -> Version:
    """Return the oldest version that may write tokens for this step."""
    return Version(max(0, step - max_staleness))


def newest_step(published: Version, max_staleness: int) -> Step:
    """Return the last step whose round may open once this version is published."""
    return Step(published + max_staleness)
