"""Where an answer ends: by id, by stop string, by length; the same in one go and token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.engines.builtin.ending import Ending

LETTERS = "abcdefgh"


def decode(tokens: list[int]) -> str:
    """Tokens 0 to 7 are a letter each, and the others have no text."""
    return "".join(LETTERS[token] for token in tokens if token < len(LETTERS))


def test_a_stop_string_of_many_tokens_is_found():
    stop = "abcd" * 50
    text = [LETTERS.index(letter) for letter in "hh" + stop + "h"]
    ending = Ending(2, frozenset(), (stop,), decode)
    assert ending.find([5, 5], text, 1000) == (202, "stop")
    assert ending.find([5, 5, *text[:201]], text[201:], 1000) == (1, "stop"), "most of it was there before"
    assert ending.is_over(text[:202]) and not ending.is_over(text[:201])


def test_the_prompt_is_no_part_of_a_stop_string():
    assert Ending(2, frozenset(), ("ab",), decode).find([7, 0], [1, 1], 9) == (2, None)


def test_tokens_without_text_do_not_hide_a_stop_string():
    assert Ending(0, frozenset(), ("ab",), decode).find([], [0, *[9] * 8, 1, 2], 100) == (10, "stop")


def decode_bytes(tokens: list[int]) -> str:
    """As tokenizers that fall back to bytes do: all of them are text, or each is nothing."""
    try:
        return bytes(tokens).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(tokens)


@pytest.mark.parametrize("character", "ሴ㈰𐍈é")
def test_a_stop_string_is_found_where_what_is_looked_at_begins_within_a_character(character):
    text = list(("ሴ" * 9 + character).encode())
    ending = Ending(2, frozenset(), (character,), decode_bytes)
    expected = (3 if character == "ሴ" else len(text), "stop")
    assert ending.find([5, 5], text, 1000) == expected


@given(
    st.lists(st.integers(0, 9), min_size=3, max_size=60),
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.sets(st.integers(0, 9), max_size=1),
    st.lists(st.text(LETTERS[:3], min_size=1, max_size=3), max_size=2),
    st.integers(1, 40),
)
def test_a_burst_ends_where_its_tokens_do_one_by_one(text, new, ids, stops, room):
    ending = Ending(3, frozenset(ids), tuple(stops), decode)
    expected = len(new), None
    for num in range(1, len(new) + 1):
        end = ending.find([*text, *new[: num - 1]], new[num - 1 : num], room - num + 1)[1]
        if end is not None:
            expected = num, end
            break
    assert ending.find(text, new, room) == expected
