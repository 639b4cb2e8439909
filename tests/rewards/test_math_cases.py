"""The mathematics reward on answers as models write them, and on expressions that are meant to take for ever."""

import time

import pytest

from polyrl.rewards import math_answers
from polyrl.rewards.reward import RewardFailed, RewardInput, RewardTimedOut

CASES = [
    (r"<think>maybe \boxed{3}</think> so \boxed{4}", "4", 1),
    (r"<think>\boxed{4}</think> \boxed{3}", "4", 0),
    ("<think>it is 4", "4", 1),
    (r"<think>no \boxed{5}</think>4", "4", 1),
    (r"<think>\boxed{4}</think> I give up", "4", 0),
    (r"\boxed{42}", "42", 1),
    (r"\boxed{ 42 }", "42", 1),
    (r"\fbox{42}", "42", 1),
    (r"\boxed{42.}", "42", 1),
    (r"\boxed{x=42}", "42", 1),
    ("$x = 42$", "42", 1),
    (r"\boxed{41} then \boxed{42}", "42", 1),
    (r"\boxed{42} then \boxed{41}", "42", 0),
    (r"\boxed{\boxed{42}}", "42", 1),
    (r"\boxed{\text{42}}", "42", 1),
    (r"\boxed{\mathbf{42}}", "42", 1),
    ("**42**", "42", 1),
    ("The answer is **42**.", "42", 1),
    ("#### 42", "42", 1),
    ("42", "42", 1),
    ("1,000", "1000", 1),
    (r"\boxed{1{,}000}", "1000", 1),
    (r"\boxed{1\,000}", "1000", 1),
    ("1000.0", "1000", 1),
    ("10^3", "1000", 1),
    (r"\boxed{-7}", "-7", 1),
    (r"\boxed{7}", "-7", 0),
    (r"\boxed{+7}", "7", 1),
    (r"\boxed{0.5}", r"\frac12", 1),
    (r"\boxed{.5}", "0.5", 1),
    (r"\boxed{50\%}", "0.5", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{\frac{1}{3}}", "0.333", 0),
    (r"\boxed{0.3333333333}", r"\frac13", 1),
    (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1),
    (r"\boxed{1/2}", r"\frac{1}{2}", 1),
    (r"\boxed{\dfrac{1}{2}}", "1/2", 1),
    (r"\boxed{\tfrac12}", "1/2", 1),
    (r"\boxed{\frac12}", "0.5", 1),
    (r"\boxed{2\frac{1}{2}}", "2.5", 1),
    (r"\boxed{\frac{-1}{2}}", r"-\frac{1}{2}", 1),
    (r"\boxed{-\frac12}", r"\frac{1}{-2}", 1),
    (r"\boxed{\frac{1}{2}}", "2", 0),
    (r"\boxed{\frac{\pi}{2}}", r"\pi/2", 1),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1),
    (r"\boxed{\sqrt 2}", r"\sqrt{2}", 1),
    (r"\boxed{2^{1/2}}", r"\sqrt{2}", 1),
    (r"\boxed{\sqrt[3]{27}}", "3", 1),
    (r"\boxed{\frac{1}{\sqrt2}}", r"\frac{\sqrt{2}}{2}", 1),
    (r"\boxed{2^{10}}", "1024", 1),
    (r"\boxed{e^0}", "1", 1),
    (r"\boxed{\ln e}", "1", 1),
    (r"\boxed{\log_2 8}", "3", 1),
    (r"\boxed{3!}", "6", 1),
    (r"\boxed{\{1,2,3\}}", r"\{3,2,1\}", 1),
    (r"\boxed{\{1,2\}}", r"\{1,2,3\}", 0),
    (r"\boxed{1,2,3}", r"\{1,2,3\}", 1),
    (r"\boxed{(1,2)}", "(1,2)", 1),
    (r"\boxed{(2,1)}", "(1,2)", 0),
    (r"\boxed{[1,2]}", "[1,2]", 1),
    (r"\boxed{[1,2)}", "[1,2]", 0),
    (r"\boxed{(1,2]}", "(1,2]", 1),
    (r"\boxed{(-\infty,3)}", r"(-\infty, 3)", 1),
    (r"\boxed{(-\infty,1)\cup(2,\infty)}", r"(2,\infty)\cup(-\infty,1)", 1),
    (r"\boxed{x<3}", r"(-\infty,3)", 1),
    (r"\boxed{x\le3}", r"(-\infty,3)", 0),
    (r"\boxed{x \ge 2}", r"[2,\infty)", 1),
    (r"\boxed{1 < x < 2}", "(1,2)", 1),
    (r"\boxed{1 < x < 3}", "(1,2)", 0),
    (r"\boxed{[2,\infty)}", r"x \ge 2", 1),
    (r"\boxed{x \in [1,2]}", "[1,2]", 1),
    (r"\boxed{\emptyset}", r"\emptyset", 1),
    (r"\boxed{(\frac12, 3)}", "(0.5,3)", 1),
    (r"\boxed{x=1 \text{ or } x=2}", r"\{1,2\}", 1),
    (r"\boxed{x=1, x=2}", "1,2", 1),
    (r"\boxed{\pm 2}", r"\{-2,2\}", 1),
    (r"\boxed{1 \pm \sqrt{2}}", r"\{1-\sqrt2, 1+\sqrt2\}", 1),
    (r"\boxed{5\text{ cm}}", "5", 1),
    (r"\boxed{5\,\mathrm{cm}}", "5", 1),
    (r"\boxed{5 \text{ cm}^2}", "5", 1),
    (r"\boxed{\$5}", "5", 1),
    (r"\boxed{5^\circ}", "5", 1),
    (r"\boxed{30^{\circ}}", "30", 1),
    ("5 dollars", "5", 1),
    (r"\boxed{5 \text{ apples}}", "5", 1),
    (r"\boxed{12\text{ cm}}", "5", 0),
    ("5 km/h", "5", 1),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{(x-1)(x+1)}", "x^2-1", 1),
    (r"\boxed{x^2}", "x^3", 0),
    (r"\boxed{y=2x+1}", "y=2x+1", 1),
    (r"\boxed{2x+1}", "y=2x+1", 1),
    (r"\boxed{a+b}", "b+a", 1),
    (r"\boxed{\sin^2 x+\cos^2 x}", "1", 1),
    (r"\boxed{\frac{x}{y}}", "x/y", 1),
    (r"\boxed{i}", "i", 1),
    (r"\boxed{3+4i}", "4i+3", 1),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 1),
    (r"\boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", 0),
    (r"\boxed{\text{yes}}", r"\text{yes}", 1),
    (r"\boxed{\text{no}}", r"\text{yes}", 0),
    (r"\boxed{A}", "A", 1),
    (r"\boxed{\text{(B)}}", "B", 1),
    (r"\boxed{\text{Monday}}", r"\text{Monday}", 1),
    (r"\boxed{}", "3", 0),
    (r"\boxed{?}", "3", 0),
    (r"\boxed{\infty}", r"\infty", 1),
]


@pytest.mark.parametrize(("answer", "expected", "reward"), CASES)
def test_an_answer_is_compared_as_it_is_meant(answer: str, expected: str, reward: int):
    assert math_answers.score(RewardInput("", answer, expected, {}, "stop", 1)) == reward


def test_there_are_a_hundred_cases():
    assert len(CASES) >= 100


ENDLESS = {
    "towers": r"\boxed{9^{9^{9^{9}}}}",
    "a tower of tens": r"\boxed{10^{10^{10}}}",
    "factorials": r"\boxed{((10!)!)!}",
    "a binomial": r"\boxed{\binom{10^9}{5 \cdot 10^8}}",
    "nested fractions": r"\boxed{" + r"\frac{1}{1+" * 300 + "1" + "}" * 300 + "}",
    "nested roots": r"\boxed{" + r"\sqrt{1+" * 200 + "1" + "}" * 200 + "}",
    "a long sum": r"\boxed{" + "+".join(f"x_{{{number}}}^{{{number}}}" for number in range(800)) + "}",
    "a power of a sum": r"\boxed{(a+b+c+d+e)^{200}}",
    "a large matrix": r"\boxed{\begin{pmatrix}" + r"\\".join(["&".join("123456789" * 4)] * 36) + r"\end{pmatrix}^{50}}",
    "nested functions": r"\boxed{" + r"\sin(" * 100 + "x" + ")" * 100 + "}",
    "open braces": r"\boxed{" * 5000,
    "digits": "9" * 200_000,
    "dots and spaces": "1. " * 100_000 + r"\boxed{1" + ". " * 50_000,
    "an integral": r"\boxed{\int_0^{10^9} e^{x^2} \sin(x^{x}) dx}",
}
LIMIT_S = 0.5


@pytest.mark.parametrize("name", ENDLESS)
def test_no_expression_takes_longer_than_its_limit(name: str):
    math_answers.score(RewardInput("", "1", "1", {}, "stop", 1), limit_s=60.0)  # imports what there is to import
    began = time.process_time()
    try:
        found = math_answers.score(RewardInput("", ENDLESS[name], "42", {}, "stop", 1), limit_s=LIMIT_S)
    except RewardTimedOut:
        found = None
    assert found in (None, 0.0)
    assert time.process_time() - began < LIMIT_S + 1.0


@pytest.mark.parametrize("expected", ["(" * 3000 + "1" + ")" * 3000, "9" * 100_000])
def test_an_expected_answer_has_the_same_limit_and_one_that_cannot_be_read_is_named(expected: str):
    math_answers.score(RewardInput("", "1", "1", {}, "stop", 1), limit_s=60.0)
    began = time.process_time()
    with pytest.raises(RewardFailed, match=r"the expected answer '.{80}' (cannot be read as|could not be read in)"):
        math_answers.score(RewardInput("", r"\boxed{1}", expected, {}, "stop", 1), limit_s=LIMIT_S)
    assert time.process_time() - began < LIMIT_S + 1.0
