"""Text while it comes: put together, it is what the tokenizer makes of the whole; stop strings are cut anywhere."""

import asyncio
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serving import byte_tokenizer, fallback_tokenizer

from polyrl.manager.serving.requests import AskError
from polyrl.manager.serving.texts import Reader, TextModel

END = 258
BYTES = TextModel(byte_tokenizer(), template=None, end_ids=frozenset({END}))
FALLBACK = TextModel(fallback_tokenizer(), template=None, end_ids=frozenset())
tokens_of_bytes = st.lists(st.integers(0, 255), max_size=80)
texts = st.text(max_size=40)


def encoded(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False).ids


def shown(model: TextModel, tokens: list[int], sizes: list[int]) -> str:
    """What is shown of an answer that comes in pieces of these sizes."""
    reader, text = Reader(model, ()), ""
    rest = tokens
    for size in sizes:
        reader.read(rest[:size])
        rest = rest[size:]
        assert reader.text.startswith(text), "what was shown is taken back"
        text = reader.text
    reader.read(rest)
    reader.end()
    assert reader.text.startswith(text)
    return reader.text


sizes_of_pieces = st.lists(st.integers(1, 5), max_size=30)


@given(tokens_of_bytes, sizes_of_pieces)
def test_any_bytes_in_any_pieces_are_what_the_tokenizer_makes_of_the_whole(tokens, sizes):
    assert shown(BYTES, tokens, sizes) == BYTES.decode(tokens)


words = st.integers(256, 298).map(lambda token: [token])
characters = st.characters(codec="utf-8").map(lambda letter: list(letter.encode()))


@given(st.lists(words | characters, max_size=40).map(lambda parts: [*chain.from_iterable(parts)]), sizes_of_pieces)
def test_so_are_those_of_a_tokenizer_that_falls_back_to_bytes_and_writes_spaces_before_words(tokens, sizes):
    assert shown(FALLBACK, tokens, sizes) == FALLBACK.decode(tokens)


@given(texts, sizes_of_pieces)
def test_a_text_comes_out_as_it_went_in(text, sizes):
    tokens = encoded(text)
    assert shown(BYTES, tokens, sizes) == text


def test_a_character_is_shown_when_its_last_byte_has_come():
    reader = Reader(BYTES, ())
    seen = []
    for token in encoded("a\u20ac\U0001f600!"):
        reader.read([token])
        seen.append(reader.text)
    assert seen == [
        "a",
        "a",
        "a",
        "a\u20ac",
        "a\u20ac",
        "a\u20ac",
        "a\u20ac",
        "a\u20ac\U0001f600",
        "a\u20ac\U0001f600!",
    ]


def test_a_character_that_never_becomes_whole_is_shown_at_the_end():
    reader = Reader(BYTES, ())
    reader.read(encoded("\u20ac")[:2])
    assert reader.text == ""
    reader.end()
    assert reader.text == "\ufffd"


def test_the_token_that_ends_an_answer_is_no_text():
    reader = Reader(BYTES, ())
    reader.read([*encoded("yes"), END])
    reader.end()
    assert (reader.text, reader.num_tokens) == ("yes", 4)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_an_answer_ends_before_the_first_stop_string_and_nothing_of_it_is_ever_shown(text, stops):
    reader = Reader(BYTES, stops)
    for token in encoded(text):
        reader.read([token])
        assert text.startswith(reader.text)
        assert not any(stop in reader.text for stop in stops)
    reader.end()
    num = next((num for num in range(len(text) + 1) if any(stop in text[:num] for stop in stops)), None)
    assert reader.is_stopped == (num is not None)
    assert reader.num_tokens == (len(text) if num is None else num)
    cut = len(text) if num is None else min(at for at in (text[:num].find(stop) for stop in stops) if at >= 0)
    assert reader.text == text[:cut]


def test_a_stop_string_of_several_bytes_is_found_across_tokens_and_the_rest_is_not_read():
    reader = Reader(BYTES, ("\u20ac\n",))
    reader.read(encoded("1 \u20ac 2 \u20ac\nnever"))
    assert (reader.text, reader.is_stopped) == ("1 \u20ac 2 ", True)
    assert reader.num_tokens == len(encoded("1 \u20ac 2 \u20ac\n"))


def test_without_a_tokenizer_tokens_are_counted():
    reader = Reader(None, ())
    reader.read([1, 2, 3])
    reader.end()
    assert (reader.text, reader.num_tokens) == ("", 3)


class CountingTokenizer:
    """Counts how much it was given."""

    def __init__(self) -> None:
        self.num_characters = 0

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        self.num_characters += sum(map(len, texts))
        return byte_tokenizer().encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("text", ["x" * 1_000_000, "€" * 400])
def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenized(text: str):
    tokenizer = CountingTokenizer()
    model = TextModel(tokenizer, template=None, end_ids=frozenset(), max_context=64)
    with pytest.raises(AskError, match="at most 1024 are read, for a context of 64 tokens"):
        asyncio.run(model.tokens(text))
    assert tokenizer.num_characters == 0
    assert len(asyncio.run(model.tokens("x" * 1024))) == 1024


def test_where_a_model_does_not_say_what_it_reads_there_is_a_bound_all_the_same():
    tokenizer = CountingTokenizer()
    model = TextModel(tokenizer, template=None, end_ids=frozenset())
    with pytest.raises(AskError, match="a text of 4000000 bytes"):
        asyncio.run(model.tokens("x" * 4_000_000))
    assert tokenizer.num_characters == 0
