"""Environments of public packages, unmodified, against policies that were written down.

Each needs its package; `make environments` installs them, each set into an environment of its own.
"""

import asyncio
import contextlib
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.hosts.playing import Played, needs, play
from tests.hosts.policies import HERMES, PlayedByHand
from tests.serving import save_tokenizer

from polyrl.errors import ConfigError, UserError
from polyrl.hosts.adapters.packages import need
from polyrl.hosts.episode import CallLimits, DrawnAnswer, EpisodeEnd, EpisodeFailed
from polyrl.hosts.front import HostFront
from polyrl.hosts.own import HostParts
from polyrl.hosts.registry import find_environment

HERE = Path(__file__).parent


# Without any package


def test_a_missing_package_is_one_line_that_names_what_to_install():
    with pytest.raises(UserError, match=r"^this environment needs polyrl_nobody: pip install 'polyrl-nobody'$"):
        need("polyrl_nobody.v1", "polyrl-nobody")


def test_an_unknown_name_and_wrong_arguments_are_one_line():
    parts = HostParts(HostFront(max_context=10))
    with pytest.raises(ConfigError, match=r'^environment: unknown name "texarena"; .*did you mean textarena\?'):
        find_environment("texarena", {}, parts)
    with pytest.raises(ConfigError, match=r"^environment_args\.larget: "):
        find_environment("calculator", {"larget": 3}, parts)


def test_the_calculator_pays_for_the_right_sum_with_its_help_or_without():
    def asks(prompt: str) -> str:
        terms = re.findall(r"What is (\d+) \+ (\d+)", prompt)[-1]
        result = re.findall(r"The calculator says (\d+)", prompt)
        return result[-1] if result else f"calc {terms[0]}+{terms[1]}"

    helped, episode = play("calculator", {}, asks, index=3)
    guessed, _ = play("calculator", {}, ["0"], index=3)
    twice, _ = play("calculator", {}, ["calc 1+1", "calc 1+1"], index=3)
    assert (helped.reward, helped.parts, helped.num_turns) == (1.0, {"used_calculator": 1.0}, 2)
    assert (guessed.reward, guessed.parts) == (0.0, {"used_calculator": 0.0})
    assert twice.reward == 0.0
    assert len(episode.prompts) == 2


def test_the_treasure_is_found_by_turning_round_when_it_gets_colder():
    def turns_round(prompt: str) -> str:
        side = "left"
        for told in re.findall(r"user\n(warmer|colder)", prompt):
            side = side if told == "warmer" else {"left": "right", "right": "left"}[side]
        return side

    ends = [play("treasure", {}, turns_round, index=index)[0] for index in range(12)]
    assert [end.reward for end in ends] == [1.0] * 12
    assert play("treasure", {}, ["up"])[0].why == "neither left nor right"


# TextArena


@needs("textarena")
def test_a_game_of_textarena_is_played_over_several_turns_and_only_what_is_new_is_said():
    end, episode = play("textarena", {"game": "FrozenLake-v0"}, ["[right]", "[left]", "jump", "jump"], seed=7)
    assert end.num_turns == 4
    assert end.why.startswith("Invalid Move")
    assert end.reward < 1.0
    assert episode.shown(3).count("Welcome to Frozen Lake") == 1
    old = [*episode.prompts[1], *episode.drawn[1].tokens]
    assert episode.prompts[2][: len(old)] == old


@needs("textarena")
def test_games_of_textarena_are_the_same_whatever_else_is_played_at_the_same_time():
    moves = ["[right]", "[down]", "[right]", "[down]", "[right]", "[down]"] * 4

    async def boards(*, together: bool) -> list[str]:
        async with Played("textarena", {"game": "FrozenLake-v0"}) as one:
            plays = [one.play(moves, index=index, name=f"1/{index}") for index in range(8)]
            ended = await asyncio.gather(*plays) if together else [await play for play in plays]
        return [episode.shown(len(episode.prompts) - 1) for _, episode in ended]

    alone = asyncio.run(boards(together=False))
    assert asyncio.run(boards(together=True)) == alone
    assert len(set(alone)) > 1


@needs("textarena")
@pytest.mark.parametrize(
    ("game", "line"),
    [
        ("FrozenLake", "textarena: no game 'FrozenLake'"),
        ("TicTacToe-v0", "textarena: TicTacToe-v0 is not a game for one"),
    ],
)
def test_a_game_that_is_not_there_or_not_for_one_player_is_one_line(game: str, line: str):
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        play("textarena", {"game": game}, [])


# reasoning-gym, skyrl-gym


@needs("reasoning_gym")
def test_a_task_of_reasoning_gym_is_scored_by_its_data_set():
    def solves(prompt: str) -> str:
        expression = re.findall(r"arithmetic problem: (.*) =", prompt)[-1]
        return f"I think <answer>{eval(expression)}</answer>"

    right, _ = play("reasoning-gym", {"dataset": "chain_sum", "size": 10}, solves, index=4)
    wrong, _ = play("reasoning-gym", {"dataset": "chain_sum", "size": 10}, ["no idea"], index=4)
    assert (right.reward, right.correct, right.num_turns) == (1.0, True, 1)
    assert not wrong.correct
    with pytest.raises(UserError, match=r"^reasoning-gym: chain_summ: "):
        play("reasoning-gym", {"dataset": "chain_summ"}, [])


@needs("skyrl_gym")
def test_an_environment_of_skyrl_gym_is_played_over_turns_with_the_row_as_its_extras():
    row = {"prompt": [{"role": "user", "content": "2 + 3?"}], "reward_spec": {"ground_truth": "5"}, "extra_info": {}}
    single, _ = play("skyrl-gym", {"env": "gsm8k"}, ["#### 5"], task=row)
    several, episode = play("skyrl-gym", {"env": "gsm8k_multi_turn"}, ["hm", "#### 5"], task=row)
    assert (single.reward, single.num_turns) == (1.0, 1)
    assert (several.reward, several.num_turns, len(episode.prompts)) == (1.0, 2, 2)
    with pytest.raises(EpisodeFailed, match="skyrl-gym needs rows with prompt"):
        play("skyrl-gym", {"env": "gsm8k"}, ["5"])
    with pytest.raises(UserError, match="runs the model's code on this machine"):
        play("skyrl-gym", {"env": "lcb"}, [])


@needs("skyrl_gym")
def test_an_environment_of_skyrl_gym_whose_creator_takes_whatever_it_is_given_is_played():
    """Such a creator is the package's own contract; its parameters do not name `env_config`."""
    known = need("skyrl_gym.envs.registration", "skyrl-gym")

    def make(**given: Any) -> Any:
        assert given["env_config"] == {"folder": "x"}
        return need("skyrl_gym.envs.gsm8k.env", "skyrl-gym").GSM8kEnv(**given)

    row = {"prompt": "2 + 3?", "reward_spec": {"ground_truth": "5"}}
    known.register(id="polyrl_any", entry_point=make)
    try:
        end, _ = play("skyrl-gym", {"env": "polyrl_any", "settings": {"folder": "x"}}, ["#### 5"], task=row)
    finally:
        del known.registry["polyrl_any"]
    assert end.reward == 1.0


@needs("skyrl_gym")
def test_an_environment_of_skyrl_gym_with_settings_of_its_own_class_uses_its_tool(tmp_path: Path):
    folder = tmp_path / "spider" / "database" / "sums"
    folder.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(folder / "sums.sqlite")) as made:
        made.executescript("create table terms(a); insert into terms values (4), (5);")
    gold = {"reward_spec": {"ground_truth": "select sum(a) from terms"}}
    row = {"prompt": "add them up", "db_id": "sums", "data": "spider", **gold}
    answers = [
        "<think>look</think><sql>select a from terms</sql>",
        "<think>so</think><solution>select sum(a) from terms</solution>",
    ]
    args = {"env": "text2sql", "settings": {"db_path": str(tmp_path)}}
    end, episode = play("skyrl-gym", args, answers, task=row)
    assert (end.reward, end.num_turns) == (1.0, 2)
    assert "<observation>" in episode.shown(1)
    with pytest.raises(UserError, match=r"^skyrl-gym: text2sql: TypeError: .*'folder'"):
        play("skyrl-gym", {"env": "text2sql", "settings": {"folder": "x"}}, [])


# verifiers


def uses_the_tool(prompt: str) -> str:
    """Call the tool that the system message names; answer with its result."""
    if "<|im_start|>tool\n" in prompt:
        return prompt.rsplit("<|im_start|>tool\n", 1)[1].partition("<|im_end|>")[0].strip()
    term = re.findall(r"What is (\d+) \+ 2", prompt)[-1]
    name = re.search(r'"name": "(\w*add)"', prompt)
    if name is None:
        return str(int(term) + 2)
    return f"<tool_call>\n{json.dumps({'name': name[1], 'arguments': {'a': int(term), 'b': 2}})}\n</tool_call>"


@needs("verifiers")
def test_a_tool_environment_of_verifiers_is_played_unmodified_and_its_turns_are_one_sequence(sums: dict[str, Any]):
    sums["taskset"]["with_tools"] = True

    async def run() -> Any:
        async with Played("verifiers", sums) as one:
            ended = await asyncio.gather(
                *(one.play(uses_the_tool, index=index, name=f"1/{index}") for index in range(4))
            )
            return one.environment.num_tasks, ended

    num_tasks, ended = asyncio.run(run())
    assert num_tasks == 4
    for end, episode in ended:
        assert (end.reward, end.correct, end.num_turns, end.parts) == (1.0, True, 2, {"exact": 1.0})
        old = [*episode.prompts[0], *episode.drawn[0].tokens]
        assert episode.prompts[1][: len(old)] == old


@needs("verifiers")
def test_an_episode_of_verifiers_that_a_lost_call_broke_has_failed_although_it_has_a_reward(sums: dict[str, Any]):
    class Lost(PlayedByHand):
        async def draw(self, prompt: Any, limits: CallLimits) -> DrawnAnswer:
            raise EpisodeFailed("begun elsewhere")

    async def run() -> Any:
        async with Played("verifiers", sums) as one:
            with pytest.raises(EpisodeFailed, match="its last request was not answered: begun elsewhere"):
                await one.environment.play(Lost(one.text, []))
            return (await one.play(["5"], index=0))[0].reward

    assert asyncio.run(run()) == 1.0


@needs("verifiers")
def test_a_policy_that_fills_the_context_ends_its_episode_of_verifiers_and_is_scored(sums: dict[str, Any]):
    sums["taskset"]["with_tools"] = True

    async def run() -> EpisodeEnd:
        async with Played("verifiers", sums) as one:
            call = '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'
            episode = PlayedByHand(one.text, ["x" * 300 + call] * 9, max_context=1200)
            return await one.environment.play(episode)

    assert asyncio.run(run()).reward == 0.0


@needs("verifiers")
def test_of_a_conversation_with_a_user_whom_the_policy_plays_the_assistants_calls_alone_are_trained(
    sums: dict[str, Any],
):
    sums = {"id": "user-sim", "taskset": sums["taskset"], "user": {"harness": {"id": "null"}, "max_turns": 4}}

    def both(prompt: str) -> str:
        is_user = "You are role-playing a USER" in prompt
        return ("###DONE###" if "\n5<|im_end|>" in prompt else "what is 3 + 2?") if is_user else "5"

    end, episode = play("verifiers", sums, both)
    of_user = [at for at in range(len(episode.prompts)) if "You are role-playing a USER" in episode.shown(at)]
    assert len(episode.prompts) > len(of_user) > 1
    assert list(end.untrained) == of_user


@needs("verifiers")
def test_verifiers_own_renderer_sends_tokens_with_the_session_of_its_trace(sums: dict[str, Any], tmp_path: Path):
    from polyrl.hosts.known_families import find_family
    from polyrl.hosts.texts import load_text

    folder = save_tokenizer(tmp_path / "model")
    (folder / "config.json").write_text('{"eos_token_id": 257, "max_position_embeddings": 20000}')
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|im_end|>"}))
    text = load_text(folder)
    family = find_family(folder, text, "default")
    assert family is not None

    async def run() -> tuple[EpisodeEnd, PlayedByHand]:
        async with Played("verifiers", sums, text, family=family, folder=str(folder)) as one:
            return await one.play(["7"], index=2)

    end, episode = asyncio.run(run())
    assert (end.reward, end.num_turns) == (1.0, 1)
    assert episode.shown(0) == "<|im_start|>user\nWhat is 5 + 2?<|im_end|>\n<|im_start|>assistant\n"


@needs("renderers")
def test_a_model_whose_template_is_not_the_familys_is_not_taken_for_one_of_it(tmp_path: Path):
    from polyrl.hosts.known_families import find_family
    from polyrl.hosts.texts import load_text

    folder = save_tokenizer(tmp_path / "Qwen3-0.6B", HERMES)
    assert find_family(folder, load_text(folder)) is None
    with pytest.raises(UserError, match=r"^renderer qwen3: "):
        find_family(folder, load_text(folder), "qwen3")


@needs("verifiers")
@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "verifiers: taskset.id is missing"),
        ({"taskset": "polyrl_nobody"}, "verifiers: ModuleNotFoundError: taskset 'polyrl_nobody' not found"),
        ({"taskset": "polyrl_test_sums", "agent": {"max_turn": 3}}, "verifiers: ValidationError: "),
    ],
)
def test_settings_that_verifiers_refuses_are_one_line(sums: dict[str, Any], args: dict[str, Any], line: str):
    with pytest.raises(UserError) as raised:
        play("verifiers", args, [])
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


@pytest.fixture
def five_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NLTK's list of words, which TextArena's games of words download: a short one, and nobody to download from."""
    nltk = pytest.importorskip("nltk")

    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (folder / name).write_text("" if name == "README" else "apple\nbridge\ncandle\ndesert\nengine\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@needs("verifiers")
@needs("textarena")
@pytest.mark.usefixtures("five_words")
def test_a_game_that_verifiers_own_adapter_for_textarena_plays_is_played_by_a_host():
    def guesses(prompt: str) -> str:
        """Letters of the words, the next one that was not guessed."""
        tried = re.findall(r"assistant\n\[(\w)\]", prompt)
        return f"[{next(letter for letter in 'EANDRIGPLCBTS' if letter not in tried)}]"

    async def run() -> list[tuple[EpisodeEnd, PlayedByHand]]:
        async with Played("verifiers", {"taskset": {"id": "textarena", "game": "Hangman-v0"}}) as one:
            assert one.environment.num_tasks is None
            plays = [one.play(guesses, index=index, name=f"1/{index}") for index in range(6)]
            ended = await asyncio.gather(*plays)
            return [*ended, await one.play(guesses, index=0, name="2/0")]

    *ended, again = asyncio.run(run())
    assert {end.reward for end, _ in ended} >= {1.0}
    for end, episode in ended:
        assert end.parts == {"game_reward": end.reward}
        assert end.num_turns == len(episode.prompts) > 1
        for before, drawn, after in zip(episode.prompts, episode.drawn, episode.prompts[1:], strict=False):
            assert after[: len(before) + len(drawn.tokens)] == [*before, *drawn.tokens]
    assert (again[0].reward, again[1].prompts) == (ended[0][0].reward, ended[0][1].prompts)


# OpenEnv


@needs("openenv")
def test_openenv517_eight_episodes_share_one_session_one_after_the_other_and_none_is_scored_zero(counting_server: str):
    async def run() -> list[EpisodeEnd]:
        async with Played("openenv", {"url": counting_server, "sessions": 1, "observation": "text"}) as one:
            ended = await asyncio.gather(*(one.play(["1", "2", "3"], name=f"1/{index}") for index in range(8)))
        return [end for end, _ in ended]

    ends = asyncio.run(run())
    assert [(end.reward, end.num_turns) for end in ends] == [(1.0, 3)] * 8
