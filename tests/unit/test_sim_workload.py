"""Natural lengths follow the scenario's quantiles, or a recording."""

from math import log
from statistics import NormalDist, correlation

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.errors import ConfigError
from polyrl.sim.scenario import SimDomainSection
from polyrl.sim.workload import Trace, TraceRow, Workload, read_trace

MATH = [(0.05, 151.0), (0.25, 415.0), (0.5, 661.0), (0.75, 1129.0), (0.9, 2566.0), (0.95, 4101.0)]
CAP = 16_384


def domain(name="math", **settings) -> SimDomainSection:
    return SimDomainSection(**{"name": name, "prompts_per_step": 128, "length_quantiles": MATH, **settings})


def lengths(workload: Workload, num_prompts: int, per_prompt: int = 1) -> list[int]:
    return [workload.answer_tokens(0, p, 0, i) for p in range(num_prompts) for i in range(per_prompt)]


@given(
    prompt=st.integers(0, 10**6),
    turn=st.integers(0, 50),
    index=st.integers(0, 15),
    step=st.integers(0, 10_000),
    cap=st.integers(1, 40_000),
    cap_share=st.floats(0, 1),
    rho=st.floats(0, 1),
    growth=st.floats(-0.5, 0.5),
)
def test_a_length_is_a_fact_between_one_and_the_cap(prompt, turn, index, step, cap, cap_share, rho, growth):
    workload = Workload([domain(cap_share=cap_share, correlation=rho)], cap, 1, growth)
    tokens = workload.answer_tokens(0, prompt, turn, index, step)
    assert 1 <= tokens <= cap
    workload.answer_tokens(0, prompt + 1, turn, index, step)
    assert workload.answer_tokens(0, prompt, turn, index, step) == tokens


def test_lengths_have_the_given_quantiles():
    drawn = sorted(lengths(Workload([domain()], CAP, 7), 20_000))
    for probability, tokens in MATH:
        assert drawn[int(probability * len(drawn))] == pytest.approx(tokens, rel=0.05)
    assert drawn[0] == 151


def test_the_share_at_the_cap_is_the_given_one_and_the_quantiles_below_stay():
    drawn = sorted(lengths(Workload([domain(cap_share=0.03)], CAP, 7), 20_000))
    assert drawn.count(CAP) / len(drawn) == pytest.approx(0.03, abs=0.005)
    assert drawn[len(drawn) // 2] == pytest.approx(661, rel=0.05)


def test_every_answer_of_a_domain_can_run_into_the_cap():
    assert set(lengths(Workload([domain(cap_share=1.0)], CAP, 7), 100)) == {CAP}


def test_above_the_last_quantile_lengths_rise_to_the_cap():
    drawn = sorted(lengths(Workload([domain(cap_share=0.01)], CAP, 7), 20_000))
    halfway = (4101 * CAP) ** 0.5
    score = (NormalDist().inv_cdf(0.95) + NormalDist().inv_cdf(0.99)) / 2
    assert drawn[int(NormalDist().cdf(score) * len(drawn))] == pytest.approx(halfway, rel=0.1)


def test_quantiles_above_the_cap_are_cut_to_it():
    assert max(lengths(Workload([domain()], 500, 7), 1000)) == 500


def test_samples_of_one_prompt_are_alike_as_far_as_the_correlation_says():
    alike = Workload([domain(correlation=1.0)], CAP, 7)
    assert len({alike.answer_tokens(0, 5, turn, index) for turn in range(3) for index in range(8)}) == 1

    def measured(rho: float) -> float:
        workload = Workload([domain(length_quantiles=[(0.0, 1.0), (1.0, 1e6)], correlation=rho)], 10**6, 7)
        pairs = [(workload.answer_tokens(0, p, 0, 0), workload.answer_tokens(0, p, 0, 1)) for p in range(4000)]
        return correlation([log(a) for a, _ in pairs], [log(b) for _, b in pairs])

    assert abs(measured(0.0)) < 0.05
    assert 0.44 < measured(0.5) < 0.52  # logarithms are uniform here; a Gaussian copula of 0.5 gives these 0.48


def test_seeds_and_domains_have_their_own_lengths():
    workload = Workload([domain(), domain("code")], CAP, 7)
    assert lengths(workload, 50) != lengths(Workload([domain()], CAP, 8), 50)
    assert lengths(workload, 50) != [workload.answer_tokens(1, p, 0, 0) for p in range(50)]


def test_answers_grow_with_the_steps():
    workload = Workload([domain()], CAP, 7, growth_per_step=0.01)
    base = workload.answer_tokens(0, 3, 0, 0)
    assert workload.answer_tokens(0, 3, 0, 0, step=10) == pytest.approx(min(CAP, base * 1.01**10), abs=1)


def test_a_recording_is_cycled_by_prompt_and_by_sample(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        '{"domain": "math", "prompt_tokens": 10, "lengths": [5, 6, 7]}\n'
        '{"domain": "code", "prompt_tokens": 99, "lengths": [1]}\n'
        "\n"
        '{"domain": "math", "prompt_tokens": 20, "lengths": [900]}\n'
    )
    workload = Workload([domain(), domain("code")], 100, 7, trace=read_trace(path))
    assert [workload.answer_tokens(0, 0, 0, index) for index in range(4)] == [5, 6, 7, 5]
    assert workload.answer_tokens(0, 2, 1, 0) == 6
    assert workload.answer_tokens(0, 1, 0, 0) == 100
    assert [workload.prompt_tokens(0, prompt) for prompt in range(3)] == [10, 20, 10]
    assert workload.prompt_tokens(1, 4) == 99


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "malformed"),
        ('{"domain": "math", "prompt_tokens": 10}', "lengths"),
        ('{"domain": "math", "prompt_tokens": -1, "lengths": [1]}', "prompt_tokens"),
        ('{"domain": "math", "prompt_tokens": 1, "lengths": []}', "lengths"),
        ('{"domain": "math", "prompt_tokens": 1, "lengths": ["x"]}', "lengths"),
        ('{"domain": "math", "prompt_tokens": 1, "lengths": [1], "extra": 1}', "extra"),
        ('{"domain": "\xff", "prompt_tokens": 1, "lengths": [1]}', "utf-8"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path, line, complaint):
    path = tmp_path / "lengths.jsonl"
    path.write_bytes(b'{"domain": "math", "prompt_tokens": 10, "lengths": [5]}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_a_missing_or_empty_recording_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no rows"):
        read_trace(tmp_path / "empty.jsonl")


def test_a_recording_without_a_domain_of_the_scenario_is_refused():
    trace = Trace({"code": [TraceRow("code", 1, [1])]})
    with pytest.raises(ConfigError, match=r"'math'.*code"):
        Workload([domain()], CAP, 7, trace=trace)


@pytest.mark.parametrize(("tail", "at_8k", "at_32k"), [("stretched", 8192, 32_768), ("clipped", 4101, 4101)])
def test_the_tail_above_the_last_quantile_is_as_the_scenario_says(tail, at_8k, at_32k):
    for cap, longest in ((8192, at_8k), (32_768, at_32k)):
        drawn = sorted(lengths(Workload([domain(tail=tail, correlation=0.0, cap_share=0.02)], cap, 7), 20_000))
        assert drawn[int(0.9785 * len(drawn))] == pytest.approx(longest, rel=0.3)


def test_a_log_normal_tail_goes_on_as_the_last_two_quantiles_do_whatever_the_cap():
    median, sigma = log(1000.0), 0.8
    quantiles = [(p, 2.718281828459045 ** (median + sigma * NormalDist().inv_cdf(p))) for p in (0.05, 0.5, 0.9, 0.95)]
    for cap in (16_384, 65_536):
        workload = Workload([domain(tail="log-normal", length_quantiles=quantiles, correlation=0.0)], cap, 7)
        drawn = sorted(lengths(workload, 20_000))
        wanted = 2.718281828459045 ** (median + sigma * NormalDist().inv_cdf(0.995))
        assert drawn[int(0.995 * len(drawn))] == pytest.approx(wanted, rel=0.1)
