"""The judge, in this process, against a service on loopback that fails in every way."""

import asyncio
import json
import re
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.rewards.judge_server import USAGE, Act, Asked, StandIn, stand_in

from polyrl.config.load import build
from polyrl.config.recipe_files import load_recipe
from polyrl.config.rewards import JUDGED_BY_MODEL, OWN_SANDBOX, STAYS, RewardsSection, WeightedReward
from polyrl.errors import ConfigError
from polyrl.rewards.facts import RunFacts
from polyrl.rewards.judge import Judge
from polyrl.rewards.judging.account import JudgeAccount
from polyrl.rewards.judging.questions import JudgeArgs
from polyrl.rewards.judging.replies import tokens_of
from polyrl.rewards.models.settings import RewardModelArgs
from polyrl.rewards.reward import (
    OURS,
    Reward,
    RewardFailed,
    RewardInput,
    RewardStops,
    RewardUnavailable,
    check_reward,
    find_reward,
    is_async,
)

Result = TypeVar("Result")


@pytest.fixture(autouse=True)
def _no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYRL_REWARDS", raising=False)


def tell(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    for name, value in RunFacts.variables(RunFacts(**facts)).items():
        monkeypatch.setenv(name, value)


def given(answer: str = "4", **row: Any) -> RewardInput:
    return RewardInput("2+2=", answer, row.pop("expected", "4"), row, "stop", 2)


def with_judge(service: StandIn, body: Callable[[Judge], Awaitable[Result]], **args: Any) -> Result:
    """Start, ask, close, as a process of the pool does. Pauses are short."""

    async def run() -> Result:
        judge = Judge(**{"url": service.url, "model": "the-judge", "pause_s": 0.01, **args})
        await judge.start()
        try:
            return await body(judge)
        finally:
            await judge.close()

    return asyncio.run(run())


def score(service: StandIn, asked: RewardInput | None = None, **args: Any) -> float:
    reward = with_judge(service, lambda judge: judge(given() if asked is None else asked), **args)
    assert isinstance(reward, Reward) and reward.outcome == "scored"
    return reward.score


async def in_turn(judge: Judge, asked: RewardInput) -> Reward:
    """As a process of the pool calls it."""
    async with judge.places:
        return await judge(asked)


@pytest.fixture
def service() -> Iterator[StandIn]:
    with stand_in() as found:
        yield found


def test_the_short_name_is_a_class_whose_answers_share_a_process():
    assert find_reward("judge") is Judge and is_async(find_reward("judge"))


def test_a_verdict_is_asked_for_by_schema_and_its_score_is_the_reward(service: StandIn):
    asked = given("four", level=3)
    assert score(service, asked, rubric="Be kind.", api_key_env="HOME", min_score=1, max_score=7) == 7.0
    (one,) = service.asked
    assert one.path == "/v1/chat/completions" and one.key.startswith("Bearer /")
    assert one.body["model"] == "the-judge" and one.body["temperature"] == 0.0 and one.body["max_tokens"] == 512
    wanted = one.body["response_format"]["json_schema"]["schema"]
    assert wanted["properties"]["score"] == {"type": "number", "minimum": 1, "maximum": 7}
    for part in ("2+2=", "\nfour\n", "Be kind.", "from 1 to 7", "<expected"):
        assert part in one.text


def test_without_an_expected_answer_the_question_has_no_place_for_one(service: StandIn):
    score(service, given(expected=""))
    assert "<expected" not in service.asked[0].text


def test_a_template_of_ones_own_has_columns_of_the_row_and_no_second_pass(service: StandIn):
    template = 'grade {answer} for {level} {tags}: {"score": 1}'
    score(service, given("{expected} {level}", level=3, tags=["a", "b"]), template=template, system="You are strict.")
    messages = service.asked[0].body["messages"]
    assert messages == [
        {"role": "system", "content": "You are strict."},
        {"role": "user", "content": 'grade {expected} {level} for 3 ["a","b"]: {"score": 1}'},
    ]


def test_a_template_that_names_no_column_fails_its_answer_with_the_name(service: StandIn):
    with pytest.raises(RewardFailed, match=r"its template names 'levle', expected a column of the row"):
        score(service, given(level=3), template="{answer} {levle}")


FAULTS = {
    "a time-out": Act(after_s=0.6),
    "an internal error": Act(status=500, text="oops"),
    "a bad gateway": Act(status=502, raw=b"<html>bad gateway</html>"),
    "overloaded": Act(status=529, text="overloaded"),
    "a rate limit": Act(status=429, text="slow down", headers=(("Retry-After", "0.05"),)),
    "no JSON": Act(raw=b"{'choices'"),
    "nested without end": Act(raw=b"[" * 100_000),
    "no choices": Act(raw=b'{"choices": []}'),
    "a null": Act(raw=b'{"choices": [{"message": {"content": null}}]}'),
    "a list": Act(raw=b"[1, 2]"),
    "half a body": Act(raw=b"{}", headers=(("Content-Length", "900"),)),
    "a huge body": Act(raw=b'{"x": "' + b"y" * (3 << 20) + b'"}'),
    "a broken connection": Act(reset=True),
    "no object": Act(text="I would say 7."),
    "no score": Act(text='{"points": 7}'),
    "a text as score": Act(text='{"score": "7"}'),
    "true as score": Act(text='{"score": true}'),
    "a score out of range": Act(text='{"score": 11}'),
    "not a number": Act(text='{"score": NaN}'),
    "more after the object": Act(text='{"score": 7} or rather {"score": 7'),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_fails_once_is_asked_again(fault: Act):
    with stand_in([fault, Act()]) as service:
        assert score(service, timeout_s=0.3) == 7.0
        assert len(service.asked) == 2


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_what_keeps_failing_is_unavailable_after_so_many_attempts_and_never_a_zero(fault: Act):
    with stand_in([fault]) as service:
        with pytest.raises(RewardUnavailable, match=r"\(attempt 3 of 3\)$"):
            score(service, timeout_s=0.3, attempts=3)
        assert len(service.asked) == 3


def test_a_service_that_is_not_there_is_unavailable():
    with stand_in() as service:
        pass
    with pytest.raises(RewardUnavailable, match=r"127\.0\.0\.1.*\(attempt 2 of 2\)"):
        score(service, attempts=2)


def test_retry_after_is_waited_for_by_all_that_ask_and_more_than_the_time_left_is_not():
    with stand_in([Act(status=429, headers=(("Retry-After", "0.5"),)), Act()]) as service:

        async def body(judge: Judge) -> list[Reward]:
            first = asyncio.create_task(judge(given("1")))
            while not service.asked or service.num_at_once:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            return [await judge(given("2")), await first]

        assert [one.score for one in with_judge(service, body)] == [7.0, 7.0]
        assert all(0.4 < one.at - service.asked[0].at < 3.0 for one in service.asked[1:])
    with stand_in([Act(status=429, headers=(("Retry-After", "3600"),))]) as service:
        began = time.monotonic()
        with pytest.raises(RewardUnavailable, match="no time is left for another"):
            score(service)
        assert time.monotonic() - began < 5.0 and len(service.asked) == 1


def test_a_services_cookies_are_not_kept_however_many_it_sets():
    cookies = tuple(("Set-Cookie", f"{number}={'x' * 4000}") for number in range(20))
    with stand_in([Act(headers=cookies)]) as service:
        service.url = service.url.replace("127.0.0.1", "localhost")  # of an address, none would be kept

        async def twice(judge: Judge) -> list[Reward]:
            return [await judge(given("1")), await judge(given("2"))]

        assert [one.score for one in with_judge(service, twice)] == [7.0, 7.0]
        assert [one.cookie for one in service.asked] == ["", ""]


def test_a_slow_judge_is_unavailable_before_the_answers_own_time_limit(monkeypatch: pytest.MonkeyPatch):
    tell(monkeypatch, timeout_s=1.0)
    with stand_in([Act(after_s=5.0)]) as service:
        began = time.monotonic()
        with pytest.raises(RewardUnavailable):
            score(service, timeout_s=10.0)
        assert 0.5 < time.monotonic() - began < 1.0


@pytest.mark.parametrize("status", [301, 401, 403, 404, 405])
def test_a_wrong_place_or_key_stops_the_run_with_one_line_that_names_both_and_never_the_key(
    monkeypatch: pytest.MonkeyPatch, status: int
):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    moved = (("Location", "/elsewhere"),)
    with stand_in([Act(status=status, text="what is sk-very-secret?\n", headers=moved)]) as service:
        with pytest.raises(RewardStops) as stopped:
            score(service, api_key_env="JUDGE_KEY")
        assert str(stopped.value) == (
            f"{service.url}/chat/completions answered {status}: what is (the key)? ; "
            "check args.url and args.model, and the key in JUDGE_KEY"
        )
        assert len(service.asked) == 1


def test_a_key_that_is_refused_is_found_out_before_the_first_answer(service: StandIn):
    service.models = (401, {"error": {"message": "no"}})
    with pytest.raises(RewardStops, match="/models answered 401: no"):
        score(service)
    assert service.asked == []


def test_a_service_without_a_list_of_models_is_asked_all_the_same(service: StandIn):
    service.models = (404, {"error": {"message": "no"}})
    assert score(service) == 7.0


def test_a_model_that_is_not_named_is_the_only_one(service: StandIn):
    assert score(service, model="") == 7.0 and service.asked[0].body["model"] == "the-judge"
    service.models = (200, {"data": [{"id": "a"}, {"id": "b"}]})
    with pytest.raises(RewardStops, match=r"args\.model: missing, and .* does not have exactly one; it has a, b"):
        score(service, model="")


def test_a_key_that_the_process_does_not_have_is_named(service: StandIn):
    with pytest.raises(RewardStops, match=r"NO_SUCH_KEY is not in the environment of rewards; .*rewards\.environment"):
        score(service, api_key_env="NO_SUCH_KEY")


def test_an_account_without_money_stops_the_run_though_its_status_is_that_of_a_rate_limit():
    raw = json.dumps({"error": {"message": "pay first", "code": "insufficient_quota"}}).encode()
    with stand_in([Act(status=429, raw=raw)]) as service, pytest.raises(RewardStops, match="answered 429: pay first"):
        score(service)


def test_a_service_that_knows_no_schemas_is_asked_without_one_from_then_on():
    def act(_: int, asked: Asked) -> Act:
        if "response_format" in asked.body:
            return Act(status=400, text="response_format: not supported here")
        return Act(text='Let me think.\n```json\n{"why": "good", "score": 6.5}\n```')

    async def body(judge: Judge) -> list[float]:
        return [(await judge(given(answer))).score for answer in ("1", "2")]

    with stand_in(act) as service:
        assert with_judge(service, body) == [6.5, 6.5]
        assert ["response_format" in one.body for one in service.asked] == [True, False, False]


def test_an_answer_that_the_service_refuses_fails_alone_and_the_schema_stays():
    def act(_: int, asked: Asked) -> Act:
        return Act(status=400, text="too long") if "long" in asked.text.split("<answer")[1] else Act()

    async def body(judge: Judge) -> float:
        with pytest.raises(RewardFailed, match="answered 400: too long"):
            await judge(given("a long one"))
        return (await judge(given("4"))).score

    with stand_in(act) as service:
        assert with_judge(service, body) == 7.0
        assert "response_format" in service.asked[-1].body


def test_no_more_requests_than_allowed_are_under_way_and_they_share_their_connections():
    async def body(judge: Judge) -> list[Reward]:
        return await asyncio.gather(*(in_turn(judge, given(str(number))) for number in range(24)))

    with stand_in([Act(after_s=0.05)]) as service:
        assert [one.score for one in with_judge(service, body, concurrency=4)] == [7.0] * 24
        assert 2 <= service.most_at_once <= 4 and len(service.addresses) <= 4


def test_the_processes_of_a_pool_share_the_places(monkeypatch: pytest.MonkeyPatch):
    tell(monkeypatch, processes=4)

    async def body(judge: Judge) -> list[Reward]:
        return await asyncio.gather(*(in_turn(judge, given(str(number))) for number in range(8)))

    with stand_in([Act(after_s=0.05)]) as service:
        with_judge(service, body, concurrency=8)
        assert service.most_at_once == 2


@pytest.mark.parametrize(
    ("rate", "least_s"), [({"requests_per_minute": 600}, 0.35), ({"tokens_per_minute": 60_000}, 0.4)]
)
def test_rates_hold_over_all_judges_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rate: dict[str, float], least_s: float
):
    tell(monkeypatch, run_dir=str(tmp_path))

    async def both(service: StandIn) -> None:
        judges = [Judge(url=service.url, model="m", **rate) for _ in range(2)]
        for judge in judges:
            await judge.start()
        await asyncio.gather(*(judges[number % 2](given(str(number))) for number in range(5)))
        for judge in judges:
            await judge.close()

    with stand_in() as service:
        asyncio.run(both(service))
        times = sorted(one.at for one in service.asked)
        assert len(times) == 5 and times[-1] - times[0] > least_s


def test_a_rate_that_leaves_no_time_is_unavailable_and_costs_no_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    tell(monkeypatch, run_dir=str(tmp_path), timeout_s=1.0)

    async def body(judge: Judge) -> str:
        await judge(given("1"))
        with pytest.raises(RewardUnavailable) as away:
            await judge(given("2"))
        return str(away.value)

    with stand_in() as service:
        said = with_judge(service, body, requests_per_minute=1)
        assert said == "no request is allowed in time: lower rewards.slots or raise rewards.timeout_s"
        assert len(service.asked) == 1


def test_all_that_was_spent_is_in_the_runs_account_that_of_failed_attempts_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    tell(monkeypatch, run_dir=str(tmp_path))
    prices: dict[str, Any] = {"usd_per_million_in": 2.0, "usd_per_million_out": 10.0}
    with stand_in([Act(text="no verdict"), Act(status=500), Act()]) as service:
        score(service, **prices)
        score(service, given("5"), **prices)
    totals = JudgeAccount(tmp_path).read()
    assert (totals.requests, totals.retries, totals.replies) == (4, 2, 3)
    assert (totals.tokens_in, totals.tokens_out) == (3 * USAGE["prompt_tokens"], 3 * USAGE["completion_tokens"])
    assert totals.usd == pytest.approx(3 * (100 * 2.0 + 20 * 10.0) / 1e6)
    assert 0 < totals.latency_s < 10


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": -5, "completion_tokens": 1e30}, {"prompt_tokens": True}])
def test_a_service_that_counts_no_tokens_or_nonsense_is_counted_by_its_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, usage: dict[str, Any] | None
):
    tell(monkeypatch, run_dir=str(tmp_path))
    with stand_in([Act(usage=usage)]) as service:
        score(service, json_schema=False)
    totals = JudgeAccount(tmp_path).read()
    (asked,) = service.asked
    assert (totals.tokens_in, totals.tokens_out) == (tokens_of(asked.body), tokens_of(Act().text))


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        (
            {"max_usd": 0.001},
            "judges have spent $0.0012 of rewards.max_usd = 0.001: 300 tokens in and 60 out in 3 requests; "
            "raise it to go on with --resume",
        ),
        (
            {"max_tokens": 300},
            "judges have used 360 tokens of rewards.max_tokens = 300: 300 tokens in and 60 out in 3 requests; "
            "raise it to go on with --resume",
        ),
    ],
)
def test_a_budget_that_is_used_up_stops_the_run_and_says_how_much_was_spent_also_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: dict[str, float], line: str
):
    tell(monkeypatch, run_dir=str(tmp_path), **limit)
    prices: dict[str, Any] = {"usd_per_million_in": 2.0, "usd_per_million_out": 10.0}
    with stand_in() as service:
        for number in range(3):
            assert score(service, given(str(number)), **prices) == 7.0
        for _ in range(2):  # a new object each time: what was spent is on disk
            with pytest.raises(RewardStops) as stopped:
                score(service, given("9"), **prices)
            assert str(stopped.value) == line
        assert len(service.asked) == 3


def test_dollars_cannot_be_counted_without_prices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: StandIn):
    tell(monkeypatch, run_dir=str(tmp_path), max_usd=1.0)
    with pytest.raises(RewardStops, match=r"rewards\.max_usd: cannot be counted without args\.usd_per_million_in"):
        score(service)


def test_a_judge_that_writes_no_json_is_read_by_a_pattern():
    with stand_in([Act(text="Not [[3]], rather [[8]].")]) as service:
        assert score(service, pattern=r"\[\[(\d+)\]\]") == 8.0
        assert "response_format" not in service.asked[0].body


def test_a_model_without_a_chat_template_completes_a_text():
    raw = json.dumps({"choices": [{"text": '{"score": 2}', "finish_reason": "stop"}], "usage": USAGE}).encode()
    with stand_in([Act(raw=raw)]) as service:
        assert score(service, chat=False, template="{answer}:", reply_tokens=9) == 2.0
        (one,) = service.asked
        assert one.path == "/v1/completions" and one.body["prompt"] == "4:" and one.body["max_tokens"] == 9


def test_the_fleet_cannot_be_asked_where_there_is_no_run():
    with pytest.raises(RewardStops, match="there is no run here whose fleet could be asked"):
        asyncio.run(Judge(fleet=True).start())


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "url: expected either an address such as https://api.openai.com/v1, or fleet = true"),
        ({"url": "http://a", "fleet": True}, "url: expected either"),
        ({"url": "api.openai.com"}, "url: got 'api.openai.com', expected an address"),
        ({"url": "http://a:99999999"}, "url: got"),
        ({"fleet": True, "min_score": 3, "max_score": 3}, "max_score: 3 is not above min_score = 3"),
        ({"fleet": True, "template": "grade it"}, "template: has no place {answer}"),
        ({"fleet": True, "pattern": "("}, "pattern: is no regular expression: missing )"),
        ({"fleet": True, "attempts": 0}, "attempts: "),
        ({"fleet": True, "timeout_s": 0}, "timeout_s: "),
        ({"fleet": True, "modle": "m"}, "modle: unknown key"),
        ({"fleet": 1}, "fleet: "),
    ],
)
def test_wrong_arguments_are_one_line_before_the_run_starts(args: dict[str, Any], line: str):
    with pytest.raises(ConfigError) as error:
        check_reward(find_reward("judge"), args, "rewards.functions.0.function")
    assert str(error.value).startswith(f"rewards.functions.0.args.{line}") and "\n" not in str(error.value)


def test_the_recipes_of_the_guide_can_be_read():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "judge.md").read_text(encoding="utf-8")
    recipes = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)]
    assert len(recipes) == 3
    for recipe in recipes:
        (function,) = build(recipe["rewards"], RewardsSection).functions
        if function.function == "judge":
            check_reward(find_reward("judge"), function.args, "rewards.functions.0.function")


def test_every_argument_is_in_a_table_of_the_guide():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "judge.md").read_text(encoding="utf-8")
    named = {
        name
        for row in re.findall(
            r"^\| (`[^|]*) \|", guide.replace("`rewards.sandbox`, or `whole_group`", ""), re.MULTILINE
        )
        for name in re.findall(r"`(\w+)`", row)
    }
    assert named == {*JudgeArgs.__struct_fields__, *RewardModelArgs.__struct_fields__}


@pytest.mark.parametrize("function", JUDGED_BY_MODEL)
def test_a_judge_and_a_reward_model_are_for_single_answers(function: str):
    with pytest.raises(ValueError, match=f"^whole_group: {function} scores one answer"):
        WeightedReward(function=function, whole_group=True)


@pytest.mark.parametrize("function", JUDGED_BY_MODEL)
@pytest.mark.parametrize("processes", [0, 1])
def test_a_judge_and_a_reward_model_are_refused_in_a_sandbox_wherever_it_is(function: str, processes: int):
    settings = [f"data.reward={function}", "rewards.sandbox=true", f"rewards.processes={processes}"]
    with pytest.raises(ConfigError, match=rf"^rewards\.sandbox: {function} needs the network, or a model's files"):
        load_recipe("arithmetic", settings)


@pytest.mark.parametrize("function", STAYS)
def test_a_judge_is_refused_where_reward_workers_alone_score(function: str):
    with pytest.raises(ConfigError, match=rf"^rewards\.processes: got 0, expected at least 1, for {function}"):
        load_recipe("arithmetic", [f"data.reward={function}", "rewards.processes=0"])


def test_names_in_settings_are_those_of_the_functions():
    assert {OURS[name] for name in (*OWN_SANDBOX, *JUDGED_BY_MODEL) if name in OURS} == {
        name for name in (*OWN_SANDBOX, *JUDGED_BY_MODEL) if name not in OURS
    }
