"""What holds for all properties: how their examples are chosen, and that none has a deadline of its own.

Chosen the same way each time: a change is not held up by what it did not do. `make test-long` draws at random, to find
what nobody has seen yet. Hypothesis would give an example 200 ms, and call a test flaky whose example was late once; on
a busy machine any may be.
"""

from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None)
settings.load_profile("same")
