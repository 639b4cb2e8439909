"""What holds for all tests: an example of a property has no deadline of its own.

Hypothesis gives it 200 ms, and calls a test flaky whose example was late once. On a busy machine any example may be.
"""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
