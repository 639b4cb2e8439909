"""`polyrl worker`: what is wrong with its arguments is said before an engine is made."""

import pytest

from polyrl.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--relay-on", "300.0.0.0/8"], "--relay-on[0]: '300.0.0.0/8'; expected a network"),
        (["--relay-on", "127.0.0.0/8", "--relay-on", "192.0.2.255/32"], "--relay-on[1]: no address of this machine is"),
        (["--name", "no name"], "--name: 'no name' is not a name"),
        (["--price", "nan"], "--price: nan is not a price"),
        (["--drain-deadline", "nan"], "--drain-deadline: nan; expected seconds"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["worker", "--join", "http://127.0.0.1:1", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"polyrl: error: {said}") and error.count("\n") == 1
