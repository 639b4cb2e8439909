"""The benchmark of deltas runs, checks what it applied, and says all that its callers read."""

from benchmarks import delta


def test_it_measures_every_figure_that_has_a_goal():
    result = delta.measure(quick=True)
    assert set(delta.GOALS) <= set(result)
    assert 0 < result["changed_share"] < result["changed_share_3e6"] < 0.2
    assert result["delta_ratio"] > result["published_ratio"]
