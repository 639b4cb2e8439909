"""Our steps against verl's own functions: losses, advantages, KL, corrections, aggregation; values and gradients.

verl is not among what PolyRL needs, and wants other versions of it; `make test-verl` installs it beside.
"""

from typing import Any

import numpy as np
import pytest
from tests.trainer import reference_step, table
from tests.trainer.reference_step import Known
from tests.trainer.table import CAP, TOLERANCE, Table

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.objectives.registry import BY_CRITIC

pytestmark = pytest.mark.verl
pytest.importorskip("verl", reason="verl is not installed: make test-verl installs it")

from tests.trainer import verl_step  # noqa: E402


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Table:
    return Table(tmp_path_factory.mktemp("table"))


def _far(ours: Any, its: Any) -> float:
    return float(np.linalg.norm(ours - its) / np.linalg.norm(its))


def _in_a_row(groups: list[list[Any]]) -> Any:
    return np.concatenate([one for group in groups for one in group])


def _nearer(one: Known) -> Known:
    """With a reference model that is nearer to the policy: verl holds k3 of a token at 10 and below."""
    assert one.reference is not None
    return one._replace(reference=one.now + (one.reference - one.now) / 4)


def test_verl_has_every_name_of_the_table():
    assert set(verl_step.LOSSES) == set(table.all_losses())
    assert set(verl_step.ADVANTAGES) == set(table.all_advantages())
    assert set(verl_step.AGGREGATIONS) == set(table.choices("aggregation"))
    assert set(verl_step.CORRECTIONS) == set(table.choices("correction"))


@pytest.mark.parametrize("advantage", table.all_advantages())
@pytest.mark.parametrize("loss", table.all_losses())
def test_the_references_of_the_table_are_verl_s(world, loss, advantage):
    """With these, every case of `test_every_algorithm` is a comparison with verl."""
    wrong = []
    cases = list(table.cases(loss, advantage))
    known = [[_nearer(one) for one in group] for group in world.known]
    for case in cases:
        config = AlgorithmConfig(**case)
        one, its = reference_step.slopes(config, known, CAP), verl_step.slopes(config, known, CAP)
        apart = [abs(one.loss - its.loss), _far(_in_a_row(one.logprobs), _in_a_row(its.logprobs))]
        if advantage == BY_CRITIC:
            apart.append(_far(_in_a_row(one.values), _in_a_row(its.values)))
        if not max(apart) < TOLERANCE:
            wrong.append((max(apart), case))
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong[:3]}"


TOKEN_LEVEL = [
    {"loss": "gspo", "advantage": advantage, "correction": correction, "aggregation": "seq-mean-token-mean"}
    | table.CLIPS["gspo"]
    | table.BOUNDS[correction]
    for advantage in ("grpo", "reinforce_plus_plus", BY_CRITIC)
    for correction in table.BOUNDS
]
KL_IN_REWARD = [
    {"loss": loss, "advantage": "reinforce_plus_plus", "aggregation": aggregation, "kl": "reward", "kl_coef": 0.3}
    | {"kl_estimator": estimator}
    | table.CLIPS[loss]
    for loss in table.all_losses()
    for aggregation in table.choices("aggregation")
    for estimator in ("k1", "k2")
]
"""Without k3, which verl holds at 10: the reference model of the table is too far for that."""


@pytest.mark.parametrize("cases", [TOKEN_LEVEL, KL_IN_REWARD], ids=["GSPO by tokens", "REINFORCE++ with KL"])
def test_a_whole_step_is_verl_s(world, cases):
    wrong = []
    for case in cases:
        config = AlgorithmConfig(**case)
        ours, its = world.step(config), verl_step.slopes(config, world.known, CAP)
        apart = [abs(ours.loss - its.loss), _far(ours.gradients[0], _in_a_row(its.logprobs) @ world.jacobian)]
        if config.advantage == BY_CRITIC:
            apart.append(_far(ours.gradients[1], _in_a_row(its.values) @ world.value_jacobian))
        if not max(apart) < TOLERANCE:
            wrong.append((max(apart), case))
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong[:3]}"
