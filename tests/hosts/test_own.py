"""Environments of a person's own: turns, rewards, and everything that can be wrong with them."""

import asyncio
import math
import threading
import time
from typing import Any, cast

import pytest
from tests.hosts.policies import IM_END, PlayedByHand, text_model

from polyrl.errors import UserError
from polyrl.hosts.episode import CallLimits, DrawnAnswer, EpisodeEnd, EpisodeFailed, NoRoom
from polyrl.hosts.front import HostFront
from polyrl.hosts.own import HostParts, OwnEnvironment, Turn
from polyrl.hosts.texts import ModelText


class Counting:
    """The policy is to say the next number, three times."""

    def __init__(self, first: int = 1) -> None:
        self.at = first

    def begin(self, task: dict[str, Any], seed: int) -> str:
        return f"count from {self.at}"

    def step(self, text: str) -> Turn:
        if text != str(self.at + 1):
            return Turn(done=True, reward=0.0, why=f"{text} is wrong")
        self.at += 1
        return Turn("next", done=self.at == 4, reward=1.0 if self.at == 4 else None)


def play(make: Any, answers: Any, text: ModelText | None = None, max_turns: int | None = None) -> EpisodeEnd:
    return asyncio.run(played(make, answers, text, max_turns))[0]


async def played(
    make: Any, answers: Any, text: ModelText | None = None, max_turns: int | None = None, **known: Any
) -> tuple[EpisodeEnd, PlayedByHand]:
    text = text_model() if text is None else text
    environment = OwnEnvironment(make, HostParts(HostFront(max_context=4096, text=text), text), max_turns=max_turns)
    await environment.start()
    episode = PlayedByHand(text, answers, **known)
    return await environment.play(episode), episode


def failure(make: Any, answers: Any = ("a", "b", "c"), text: ModelText | None = None) -> str:
    with pytest.raises(EpisodeFailed) as raised:
        play(make, answers, text)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_an_episode_of_three_turns_has_the_reward_of_its_last():
    end, episode = asyncio.run(played(Counting, ["2", "3", "4"]))
    assert (end.reward, end.correct, end.num_turns) == (1.0, True, 3)
    assert episode.shown(2) == (
        "<|im_start|>user\ncount from 1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
    )


def test_each_prompt_begins_with_all_tokens_of_the_turn_before():
    _, episode = asyncio.run(played(Counting, ["2", "3", "4"]))
    for before, drawn, after in zip(episode.prompts, episode.drawn, episode.prompts[1:], strict=False):
        assert after[: len(before) + len(drawn.tokens)] == [*before, *drawn.tokens]


def test_a_wrong_answer_is_scored_and_says_why():
    end = play(Counting, ["7"])
    assert (end.reward, end.correct, end.why, end.num_turns) == (0.0, False, "7 is wrong", 1)


def test_a_model_without_a_chat_template_reads_texts_put_together_with_its_answers_as_drawn():
    text = text_model(template=None)
    _, episode = asyncio.run(played(Counting, ["2", "3", "4"], text))
    assert episode.shown(1) == "count from 12<|im_end|>next"
    assert episode.prompts[1] == [*text.encode("count from 1"), *text.encode("2"), IM_END, *text.encode("next")]


def test_an_async_environment_runs_on_the_loop_and_a_plain_one_in_a_thread_of_its_own():
    seen: list[threading.Thread] = []

    class Plain(Counting):
        def step(self, text: str) -> Turn:
            seen.append(threading.current_thread())
            return super().step(text)

    class Waiting:
        async def begin(self, task: dict[str, Any], seed: int) -> str:
            return "hello"

        async def step(self, text: str) -> Turn:
            await asyncio.sleep(0)
            seen.append(threading.current_thread())
            return Turn(done=True, reward=0.5)

    play(Plain, ["2", "3", "4"])
    assert play(Waiting, ["x"]).reward == 0.5
    assert len(set(seen[:3])) == 1
    assert seen[0] is not threading.main_thread()
    assert seen[3] is threading.main_thread()


def test_a_plain_environment_that_waits_holds_up_no_other_episode():
    class Slow(Counting):
        def step(self, text: str) -> Turn:
            time.sleep(0.3)
            return Turn(done=True, reward=1.0)

    async def many() -> float:
        began = time.monotonic()
        await asyncio.gather(*(played(Slow, ["x"]) for _ in range(40)))
        return time.monotonic() - began

    assert asyncio.run(many()) < 40 * 0.3 / 2


def test_rewards_of_several_steps_are_summed():
    class Steps(Counting):
        def step(self, text: str) -> Turn:
            return Turn("more", done=text == "end", reward=0.25)

    assert play(Steps, ["a", "b", "end"]).reward == 0.75


def test_an_episode_that_is_out_of_turns_is_scored_by_the_environment_or_with_zero():
    class Endless(Counting):
        def step(self, text: str) -> Turn:
            return Turn("more")

    class Endless2(Endless):
        def out_of_turns(self) -> float:
            return -1.0

    ends = [play(one, ["x"] * 5, max_turns=4) for one in (Endless, Endless2)]
    assert [(end.reward, end.num_turns, end.why) for end in ends] == [
        (0.0, 4, "out of 4 turns"), (-1.0, 4, "out of 4 turns")
    ]  # fmt: skip


def test_an_episode_without_room_for_another_turn_is_scored_and_one_whose_first_prompt_has_none_failed():
    class Endless(Counting):
        def step(self, text: str) -> Turn:
            return Turn("more and more " * 4)

    end, episode = asyncio.run(played(Endless, ["x"] * 9, max_context=200))
    assert end.reward == 0.0
    assert "the context is 200 tokens long" in end.why
    assert end.num_turns == len(episode.prompts) < 9
    with pytest.raises(EpisodeFailed, match="its first prompt has no room"):
        asyncio.run(played(Endless, ["x"], max_context=10))


def test_an_environment_that_raises_has_failed_with_one_line():
    class Broken(Counting):
        def step(self, text: str) -> Turn:
            raise KeyError("no such\nroom")

    assert failure(Broken) == "environment Broken: KeyError: 'no such\\nroom'"


def test_an_environment_that_calls_exit_has_failed_and_ends_nothing_else():
    class Leaving(Counting):
        def step(self, text: str) -> Turn:
            raise SystemExit(3)

    assert failure(Leaving) == "environment Leaving: RuntimeError: SystemExit: 3"


@pytest.mark.parametrize(
    ("turn", "line"),
    [
        (Turn(done=True), "step said done without a reward; expected Turn(..., done=True, reward=a number)"),
        (Turn(done=True, reward=math.nan), "the reward is nan; expected a finite number"),
        (Turn(done=True, reward=cast("Any", "1")), "the reward is str; expected a number"),
        ("next", "step returned str; expected Turn(messages, done, reward)"),
        (None, "step returned NoneType; expected Turn(messages, done, reward)"),
        (Turn(cast("Any", ["next"])), "step[0]: got a text, expected an object with role and content"),
        (Turn([{"role": "user", "content": 3}]), "step[0].content: got int, expected a text, or parts of type text"),
        (Turn(cast("Any", {"role": "user"})), "step returned dict; expected a text or a list of messages"),
        (Turn(), "step said neither done nor anything to the policy; expected one of them"),
        (
            Turn(done=True, reward=1, parts={"a b": 1}),
            "a part of a reward is called 'a b'; expected letters, digits, _ . or -",
        ),
        (Turn(done=True, reward=1, parts={"a": math.inf}), "the part a of the reward is inf; expected a finite number"),
    ],
)
def test_what_an_environment_may_not_return_is_a_failure_with_one_line(turn: Any, line: str):
    class Odd(Counting):
        def step(self, text: str) -> Turn:
            return turn

    assert failure(Odd) == line


def test_a_template_that_cannot_render_the_tools_fails_the_episode():
    class WithTools(Counting):
        tools = ({"type": "function", "function": {"name": "add"}},)

    assert failure(WithTools) == "tools: the model's chat template does not render tools; leave them out"


def test_settings_that_an_environment_refuses_are_told_before_anything_is_played():
    class Picky(Counting):
        def __init__(self) -> None:
            raise ValueError("size: 0")

    class Half:
        def begin(self, task: dict[str, Any], seed: int) -> str:
            return ""

    class Fraction(Counting):
        max_tokens = 2.5

    with pytest.raises(UserError, match=r"^max_tokens: got 2.5, expected a whole number from 1 on, or None$"):
        play(Fraction, [])
    with pytest.raises(UserError, match=r"^environment Picky: ValueError: size: 0$"):
        play(Picky, [])
    with pytest.raises(UserError, match=r"^environment Half: has no method step; expected begin and step, or play$"):
        play(Half, [])


def test_an_environment_is_closed_however_its_episode_ends_and_a_bad_close_costs_no_reward():
    closed: list[str] = []

    class Closing(Counting):
        def close(self) -> None:
            closed.append(threading.current_thread().name)
            raise OSError("gone")

    async def both() -> float:
        environment = OwnEnvironment(Closing, HostParts(HostFront(max_context=4096), text_model()))
        end = await environment.play(PlayedByHand(text_model(), ["2", "3", "4"], name="7/1"))
        with pytest.raises(EpisodeFailed):
            await environment.play(PlayedByHand(text_model(), [], name="7/2"))
        return end.reward

    assert asyncio.run(both()) == 1.0
    assert closed == ["7/1", "7/2"]


def test_the_task_is_the_row_with_its_number():
    class Rows(Counting):
        def begin(self, task: dict[str, Any], seed: int) -> str:
            return f"{task['index']} {task['question']} {seed}"

    _, episode = asyncio.run(played(Rows, ["7"], index=12, seed=5, task={"question": "why?"}))
    assert "12 why? 5" in episode.shown(0)


def test_stop_strings_end_an_answer_and_are_not_shown_to_the_environment():
    class Stopping(Counting):
        stop = "\n"
        max_tokens = 50

        def step(self, text: str) -> Turn:
            return Turn(done=True, reward=1.0, why=text)

    end, episode = asyncio.run(played(Stopping, ["up\ndown…"]))
    assert end.why == "up"
    assert (episode.limits[0].stop, episode.limits[0].max_tokens) == (("\n",), 50)


def test_an_episode_that_is_called_off_is_closed_and_one_that_is_stuck_is_left_behind():
    closed: list[str] = []
    stuck = threading.Event()

    class Called(Counting):
        def close(self) -> None:
            closed.append(threading.current_thread().name)

    class Stuck(Counting):
        def step(self, text: str) -> Turn:
            stuck.wait(60)
            return Turn(done=True, reward=1.0)

    async def call_off(make: Any, name: str, *, is_waiting: bool) -> float:
        text = text_model()
        environment = OwnEnvironment(make, HostParts(HostFront(max_context=4096), text))
        episode = PlayedByHand(text, ["2", "3", "4"], name=name)
        if is_waiting:
            episode.gate.clear()
        task = asyncio.create_task(environment.play(episode))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    try:
        assert asyncio.run(call_off(Called, "5/0", is_waiting=True)) < 5
        assert asyncio.run(call_off(Stuck, "5/1", is_waiting=False)) < 5
    finally:
        stuck.set()
    assert closed == ["5/0"]


def test_calls_that_never_return_wear_a_process_out_if_they_compute_and_not_if_they_wait():
    is_over = threading.Event()

    class Spinning(Counting):
        def step(self, text: str) -> Turn:
            while text == "2" and not is_over.is_set():
                pass
            is_over.wait(60)
            return Turn(done=True, reward=1.0)

    async def scenario() -> list[str]:
        text = text_model()
        parts = HostParts(HostFront(max_context=4096), text)
        environment = OwnEnvironment(Spinning, parts, name="e", runaway_s=0.1)
        said: list[str] = []
        for num_spinning, num_waiting in ((2, 4), (1, 0)):
            answers = ["2"] * num_spinning + ["wait"] * num_waiting
            episodes = [PlayedByHand(text, [answer], name=f"7/{at}") for at, answer in enumerate(answers)]
            tasks = [asyncio.create_task(environment.play(one)) for one in episodes]
            while not all(one.drawn for one in episodes):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            end = time.monotonic() + (1.0 if num_waiting else 60.0)
            while not environment.worn_out and time.monotonic() < end:
                await asyncio.sleep(0.1)
            said.append(environment.worn_out)
        is_over.set()
        while environment.worn_out:
            await asyncio.sleep(0.01)
        return said

    before, after = asyncio.run(scenario())
    assert before == ""
    assert after.startswith("environment e: 3 calls never return, the last one at ")
    assert "test_own.py" in after and "(step)" in after


def test_calls_of_one_episode_are_drawn_one_after_the_other_and_within_the_context():
    class Watched(PlayedByHand):
        running = most = 0

        async def draw(self, prompt: Any, limits: CallLimits) -> DrawnAnswer:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.01)
            self.running -= 1
            return await super().draw(prompt, limits)

    async def run() -> Watched:
        episode = Watched(text_model(), ["x"] * 4, max_context=10)
        await asyncio.gather(*(episode.call([1] * num, CallLimits(8)) for num in range(1, 5)))
        with pytest.raises(NoRoom):
            await episode.call([1] * 10, CallLimits())
        with pytest.raises(EpisodeFailed):
            await episode.call([], CallLimits())
        return episode

    episode = asyncio.run(run())
    assert episode.most == 1
    assert [one.max_tokens for one in episode.limits] == [8, 8, 7, 6]
