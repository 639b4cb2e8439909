"""Ranks that divide the tokens of samples: which rows each has, what is refused, and who counts as one rank."""

import pytest

from polyrl.config.recipe_files import load_recipe
from polyrl.errors import ConfigError, UserError
from polyrl.run.settings import serves_from_every_node
from polyrl.trainer import contexts


class Told:
    rank, size = 5, 8

    def exchange(self, data: bytes) -> list[bytes]:
        return [bytes([rank]) for rank in range(8)]


def test_a_context_is_one_rank_for_everybody_else():
    view = contexts.InContexts(Told(), 4)
    assert (view.rank, view.size) == (1, 2)
    assert view.exchange(b"") == [b"\0", b"\4"]


@pytest.mark.parametrize(
    ("rows", "num_heads", "why"),
    [
        ("padded", 8, "train.context_ranks: DIR is trained padded, with its own attention; expected 1"),
        ("packed", 6, "train.context_ranks: 4, and DIR has 6 attention heads; expected a divisor of that"),
    ],
)
def test_a_model_whose_attention_cannot_be_divided_is_one_line(rows: str, num_heads: int, why: str):
    contexts.check("DIR", "packed", 8, 4)
    with pytest.raises(UserError) as error:
        contexts.check("DIR", rows, num_heads, 4)
    assert str(error.value) == why


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("train.context_ranks=2",), "train.context_ranks: 2, and 1 ranks share a copy"),
        (("train.ranks=4", "train.context_ranks=3"), "train.context_ranks: 3, and 4 ranks share a copy"),
        (("train.ranks=4", "train.replicas=2", "train.context_ranks=4"), "train.context_ranks: 4, and 2 ranks share"),
        (
            ("train.ranks=2", "train.context_ranks=2", "lora.rank=2", "lora.dropout=0.1"),
            "lora.dropout: expected 0 with train.context_ranks",
        ),
    ],
)
def test_ranks_that_cannot_share_samples_are_one_line(settings: tuple[str, ...], why: str):
    with pytest.raises(ConfigError, match=why):
        load_recipe("arithmetic", ["model.path=DIR", *settings])


@pytest.mark.parametrize(
    ("settings", "is_so"),
    [
        (("manager.host=10.0.0.1",), True),
        ((), False),
        (("manager.host=10.0.0.1", "weights.every_node=false"), False),
        (("manager.host=10.0.0.1", "weights.mooncake=tcp"), False),
    ],
)
def test_nodes_serve_together_where_workers_reach_all_of_them(settings: tuple[str, ...], is_so: bool):
    assert serves_from_every_node(load_recipe("arithmetic", ["model.path=DIR", *settings])) is is_so
