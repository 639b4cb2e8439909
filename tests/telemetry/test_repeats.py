"""A log says what repeats itself once, and then how often."""

from polyrl.telemetry.repeats import Repeats


def test_what_repeats_itself_is_worth_a_line_at_every_power_of_ten():
    repeats = Repeats()
    said = [repeats.again("no numbers") for _ in range(1234)]
    worth = [one for one in said if one is not None]
    assert worth == ["", " (10 times by now)", " (100 times by now)", " (1000 times by now)"]
    assert repeats.again("no room") == ""


def test_ever_new_kinds_are_each_said_and_take_no_more_and_more_memory():
    repeats = Repeats()
    assert all(repeats.again(f"prompt {number} is too long") == "" for number in range(1000))
