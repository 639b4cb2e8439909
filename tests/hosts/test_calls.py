"""A host's memory of an episode's calls: how a prompt goes on from them, and how much is kept."""

from polyrl.hosts.calls import CallMemory


def test_a_prompt_goes_on_from_the_newest_call_that_it_shares_most_with():
    memory = CallMemory()
    memory.add([1, 2, 3], [4])
    memory.add([1, 2, 3, 4, 5], [6])
    assert memory.grow([1, 2, 3, 4, 5, 6, 7]) == (1, 6, [7])
    assert memory.grow([1, 2, 9]) == (1, 2, [9])
    assert memory.grow([8]) == (-1, 0, [8])


def test_an_episode_of_many_calls_keeps_the_last_and_the_first_of_them():
    memory = CallMemory()
    said = [1, 2, 3]
    for turn in range(100):
        memory.add(said, [turn])
        said = [*said, turn, 1000 + turn]
    assert memory.num_calls == 100
    assert memory.grow(said) == (99, len(said) - 1, [1099])
    assert memory.grow([1, 2, 3, 0, 77]).kept == 4
    kept = [one for one in memory._seen if len(one)]
    assert len(kept) == 9
    assert memory.grow(memory._seen[0].tolist()) == (99, 4, [])
