"""Splitting what is large into frames."""

from hypothesis import given
from hypothesis import strategies as st

from polyrl.wire.pieces import in_pieces


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_pieces_are_the_whole_in_order_and_none_is_larger_than_its_last_item_makes_it(sizes: list[int], most: int):
    pieces = list(in_pieces(sizes, lambda size: size, most))
    assert [size for piece in pieces for size in piece] == sizes
    assert all(piece and sum(piece[:-1]) < most for piece in pieces)
    assert all(sum(piece) >= most for piece in pieces[:-1])
