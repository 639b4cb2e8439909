"""The comparison of learned limits with a fixed one: the same steps for both, and ratios of their times."""

import random

from benchmarks.adaptive_timeout import PROMPTS, SAMPLES, StepTimes, draw_step, summarize


def test_steps_are_drawn_from_their_seed_and_one_program_in_twenty_loops():
    assert draw_step(random.Random("0 1"), 1) == draw_step(random.Random("0 1"), 1)
    drawn = [one for number in range(100) for one in draw_step(random.Random(number), number)]
    assert len(drawn) == 100 * PROMPTS * SAMPLES
    assert 0.04 < sum(one.cpu_s == 0.0 for one in drawn) / len(drawn) < 0.06
    assert {one.prompt for one in drawn} == set(range(2 * PROMPTS))


def test_ratios_are_of_mean_steps_on_the_wall_and_with_cores_to_spare():
    found = summarize({"fixed": [StepTimes(90.0, 60.0, [30.0], 0)], "adaptive": [StepTimes(45.0, 40.0, [2.0], 1)]})
    assert (found["ratio"], found["ratio_with_cores_to_spare"], found["adaptive"]["correct_lost"]) == (2.0, 1.5, 1)
