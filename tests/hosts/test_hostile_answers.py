"""Answers of a policy that no environment expects: each is scored, costs no other episode anything, and runs nowhere.

A failure would be an exit that the policy learns: an episode that failed leaves its group. The packages are those of
test_packages.py.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.playing import Played, needs, play

from polyrl.errors import UserError
from polyrl.hosts.episode import EpisodeEnd

# TextArena


@needs("textarena")
def test_a_number_that_python_does_not_read_is_a_wrong_guess_as_any_other():
    end, episode = play("textarena", {"game": "GuessTheNumber-v0"}, ["[" + "9" * 5000 + "]"] * 99, seed=3)
    assert len(episode.prompts) == end.num_turns >= 1
    assert not end.correct


# reasoning-gym


@needs("reasoning_gym")
@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("prime_factorization", "no idea"),  # int("no idea")
        ("boxnet", "null"),
        ("coin_flip", "1e999"),
        ("game_of_life", '{"a": 1}'),
    ],
)
def test_an_answer_that_a_data_set_cannot_score_is_worth_nothing_and_no_failure(dataset: str, answer: str):
    end, _ = play("reasoning-gym", {"dataset": dataset, "size": 2}, [answer])
    assert (end.reward, end.correct) == (0.0, False)


@needs("reasoning_gym")
@pytest.mark.parametrize(
    ("dataset", "code"),
    [
        ("n_queens", "open({file!r}, 'w') and []"),
        ("spiral_matrix", "[open({file!r}, 'w')]"),
        ("binary_matrix", "[[open({file!r}, 'w')]]"),
        ("string_insertion", "[open({file!r}, 'w').name]"),
        ("countdown", "open({file!r}, 'w')"),
        ("puzzle24", "open({file!r}, 'w')"),
    ],
)
def test_no_data_set_runs_what_the_policy_wrote(dataset: str, code: str, tmp_path: Path):
    end, _ = play("reasoning-gym", {"dataset": dataset, "size": 2}, [code.format(file=str(tmp_path / "written"))])
    assert not end.correct
    assert not list(tmp_path.iterdir())
    assert play("reasoning-gym", {"dataset": dataset, "size": 2}, ["9**9**9**9"])[0].reward <= 0.05


@needs("reasoning_gym")
@pytest.mark.parametrize("dataset", ["n_queens", "spiral_matrix", "binary_matrix", "string_insertion", "countdown"])
def test_right_answers_to_data_sets_that_evaluate_them_have_their_reward(dataset: str):
    from polyrl.hosts.adapters.reasoning_gym import ReasoningGym

    one = ReasoningGym(dataset, size=2)
    one.begin({"index": 1}, 0)
    solved = one._entry["metadata"]["expression"] if dataset == "countdown" else one._entry["answer"]
    assert one.step(f"<answer>{solved}</answer>").reward == 1.0
    as_list = {"spiral_matrix": str(solved.split()), "string_insertion": str(list(solved))}.get(dataset)
    assert as_list is None or one.step(as_list).reward == 0.1


@needs("reasoning_gym")
def test_a_data_set_that_evaluates_names_is_refused_unless_that_is_accepted():
    with pytest.raises(UserError, match=r"^reasoning-gym: simple_integration runs what the model wrote"):
        play("reasoning-gym", {"dataset": "simple_integration"}, [])
    mixed = {"datasets": [{"name": "chain_sum"}, {"name": "polynomial_multiplication", "weight": 2.0}]}
    with pytest.raises(UserError, match=r"^reasoning-gym: polynomial_multiplication runs what the model wrote"):
        play("reasoning-gym", {"dataset": "composite", "settings": mixed}, [])
    args = {"dataset": "simple_integration", "size": 2, "allow_code": True}
    assert play("reasoning-gym", args, ["x"])[0].reward == 0.0


@needs("reasoning_gym")
def test_settings_of_a_data_set_may_be_lists_and_several_data_sets_are_mixed():
    play("reasoning-gym", {"dataset": "countdown", "size": 2, "settings": {"operators": ["+", "-"]}}, ["1"])
    mixed = {"datasets": [{"name": "chain_sum"}, {"name": "n_queens", "weight": 2.0, "config": {"n": 8}}]}
    play("reasoning-gym", {"dataset": "composite", "size": 4, "settings": mixed}, ["1"])


# verifiers

_SENT_ON = {
    "half a character": ('{"a": "\\ud800", "b": 2}', "validation error"),
    "a number beyond all": ('{"a": 1e999, "b": 2}', "validation error"),
    "a number of 5000 digits": ('{"a": ' + "9" * 5000 + ', "b": 2}', "invalid JSON in tool arguments"),
}
_NESTED = {
    "objects that nest 400 times": '{"a": ' + '{"x":' * 400 + "1" + "}" * 400 + ', "b": 1}',
    "lists that nest 1000 times": '{"a": ' + "[" * 1000 + "]" * 1000 + ', "b": 1}',
}


@needs("verifiers")
def test_tool_calls_that_no_library_can_send_end_no_episode_of_verifiers(sums: dict[str, Any]):
    """Each of these failed its episode, most after six attempts and 18 seconds."""
    sums["taskset"]["with_tools"] = True
    told: dict[str, str] = {}

    def asks(arguments: str, key: str) -> Any:
        def answer(prompt: str) -> str:
            if "<|im_start|>tool\n" in prompt:
                told[key] = prompt.rsplit("<|im_start|>tool\n", 1)[1]
                return "5"
            name = re.search(r'"name": "(\w*add)"', prompt)
            assert name is not None
            return f'<tool_call>\n{{"name": "{name[1]}", "arguments": {arguments}}}\n</tool_call>'

        return answer

    async def run() -> dict[str, EpisodeEnd]:
        async with Played("verifiers", sums) as one:
            written = {key: arguments for key, (arguments, _) in _SENT_ON.items()} | _NESTED
            return {key: (await one.play(asks(given, key), name=key))[0] for key, given in written.items()}

    ends = asyncio.run(asyncio.wait_for(run(), 60.0))
    for key, (_, line) in _SENT_ON.items():
        assert (ends[key].reward, ends[key].num_turns) == (1.0, 2), key
        assert line in told[key]
    for key in _NESTED:  # it is text, and a wrong answer
        assert (ends[key].reward, ends[key].num_turns) == (0.0, 1), key


# OpenEnv


@needs("openenv")
def test_an_action_that_the_server_does_not_take_costs_its_turn_and_no_episode(counting_server: str):
    wrong = ['{"foo": 1}', '{"message": 5}', '{"message": NaN}', "{}", '{"message": "1", "metadata": 7}']

    async def run() -> list[tuple[EpisodeEnd, str]]:
        async with Played("openenv", {"url": counting_server, "sessions": 1, "observation": "text"}) as one:
            found = []
            for at, answer in enumerate(wrong):
                end, episode = await one.play([answer, "1", "2", "3"], name=f"1/{at}")
                found.append((end, episode.shown(1)))
            nested, _ = await one.play(['{"message":' * 400 + "1" + "}" * 400], name="2/0")
            never, _ = await one.play(lambda _: "{}", name="3/0")
            return [*found, (nested, ""), (never, "")]

    *told, (nested, _), (never, _) = asyncio.run(run())
    for end, shown in told:
        assert (end.reward, end.num_turns) == (1.0, 4)
        assert "the environment takes no such action" in shown
    assert (nested.reward, nested.num_turns) == (0.0, 1)
    assert (never.reward, never.num_turns) == (0.0, 64)
