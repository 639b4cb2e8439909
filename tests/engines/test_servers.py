"""The real servers, vLLM and SGLang: the contract; the same words as the builtin engine; deaths in mid-answer.

They are slow to start, so all tests of a kind attach to one server; those that kill theirs start their own.
"""

import asyncio
import os
from collections.abc import Iterator

import pytest
from tests.builtin import stage as builtin_stage
from tests.builtin.reference import TOLERANCE
from tests.builtin.stage import GREEDY, answers
from tests.engines.killing import NUM_PROMPTS, Scenario, prompt_of
from tests.engines.servers import PATIENCE_S, Running, Setup, play, python_of, running, save
from tests.integration.live import run

from polyrl.cli.main import main
from polyrl.engines.contract import ON, EngineContract, Stage
from polyrl.engines.engine import Engine, Weights
from polyrl.engines.served.engine import ServedEngine
from polyrl.engines.served.server import ServedConfig
from polyrl.ids import Version
from polyrl.wire.frames import Sampling

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SETUPS = [Setup("vllm", "qwen3"), Setup("sglang", "qwen3")]
NUM_KILLS = int(os.environ.get("POLYRL_SERVER_KILLS", "5"))
"""The full number is 20: on two cores a start takes half a minute."""
PROMPTS = [[17, 301, 42, 9, 77], [5, 6, 7, 8], [100], list(range(2, 60))]
NUM_TOKENS = 300


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(request.param, tmp_path_factory.mktemp("server")) as found:
        yield found


class TestServers(EngineContract):
    long_tokens = 800
    silence_s = 0.5
    patience_s = PATIENCE_S

    @pytest.fixture(autouse=True)
    def _attached(self, server: Running):
        self.server = server

    def engine(self) -> Engine:
        return self.server.engine()

    def weights(self, version: int) -> Weights:
        return Weights(Version(version), folder=str(self.server.models[0]))


def test_greedy_words_are_those_of_the_builtin_engine_and_so_are_their_log_probabilities(server):
    heard: dict[str, tuple[list[list[int]], list[list[float]]]] = {}

    def script_for(name: str):
        async def script(stage: Stage) -> None:
            if name == "server":
                await stage.engine.install(Weights(Version(1), folder=str(server.models[0])))
            leases = [stage.begin(prompt=one, max_tokens=48, sampling=GREEDY) for one in PROMPTS]
            texts = await answers(stage, leases)
            heard[name] = texts, [stage.sink.logprobs[lease] for lease in leases]

        return script

    play(server, script_for("server"))
    builtin_stage.play(script_for("builtin"), server.models[0])
    assert heard["server"][0] == heard["builtin"][0]
    for theirs, ours in zip(heard["server"][1], heard["builtin"][1], strict=True):
        assert max(abs(one - other) for one, other in zip(theirs, ours, strict=True)) < TOLERANCE


def test_log_probabilities_are_those_under_the_sampling_temperature(server):
    async def script(stage: Stage) -> None:
        await stage.engine.install(Weights(Version(1), folder=str(server.models[0])))
        lease = stage.begin(max_tokens=24, sampling=Sampling(temperature=0.5, ignore_eos=True))
        await answers(stage, [lease])
        heard = stage.sink.texts[lease], stage.sink.logprobs[lease]
        assert server.reference(0).error(EngineContract.prompt, *heard, temperature=0.5) < 4 * TOLERANCE

    play(server, script)


TRUNCATED = [
    Sampling(top_p=0.5, temperature=0.7, ignore_eos=True),
    Sampling(top_k=3, temperature=1.3, ignore_eos=True),
    Sampling(min_p=0.2, ignore_eos=True),
    Sampling(top_k=40, top_p=0.7, min_p=0.05, temperature=1.5, ignore_eos=True),
]


def test_log_probabilities_are_those_before_truncation_also_beside_samples_that_are_not_truncated(server):
    async def script(stage: Stage) -> None:
        await stage.engine.install(Weights(Version(1), folder=str(server.models[0])))
        ways = [*TRUNCATED, Sampling(temperature=0.8, ignore_eos=True), GREEDY]
        leases = [stage.begin(max_tokens=24, sampling=one) for one in ways]
        await answers(stage, leases)
        for lease, one in zip(leases, ways, strict=True):
            heard = stage.sink.texts[lease], stage.sink.logprobs[lease]
            apart = server.reference(0).error(EngineContract.prompt, *heard, temperature=one.temperature or 1.0)
            assert apart < 4 * TOLERANCE, one

    play(server, script)


def test_a_stop_id_ends_an_answer_also_where_the_end_of_text_does_not(server):
    async def script(stage: Stage) -> None:
        whole = await stage.text(max_tokens=32, sampling=GREEDY)
        stop_id = whole[20]
        sampling = Sampling(temperature=0.0, ignore_eos=True, stop_ids=(stop_id,))
        lease = stage.begin(max_tokens=32, sampling=sampling)
        assert await stage.sink.end_of(lease) == "stop"
        assert stage.sink.texts[lease] == whole[: whole.index(stop_id) + 1]
        cut = whole[:10]
        rest = await stage.text(so_far=cut, max_tokens=32, sampling=GREEDY)
        assert cut + rest == whole

    play(server, script)


def test_an_abort_frees_the_place_in_the_server_itself(server):
    async def script(stage: Stage) -> None:
        one = stage.engine
        assert isinstance(one, ServedEngine)
        leases = [stage.begin(max_tokens=800, sampling=ON) for _ in range(4)]
        await stage.sink.some_of(leases[-1])
        await asyncio.gather(*(one.abort(lease) for lease in leases))
        assert one._keeper.server is not None
        async with asyncio.timeout(10.0):
            while (await one._keeper.server.load()).num_running:
                await asyncio.sleep(0.1)

    play(server, script)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_check_says_that_all_is_well(kind, tmp_path, capsys):
    model = save(Setup(kind, "qwen3"), tmp_path / "model", 0)
    arguments = ["--engine", kind, "--model", str(model), "--engine-python", python_of(kind), f"log={tmp_path}/log"]
    assert main(["worker", "--check", *arguments]) == 0, (tmp_path / "log").read_text()[-4000:]
    assert capsys.readouterr().out.endswith("check: all is well\n")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_no_sample_is_lost_when_servers_are_killed_in_mid_answer(kind, tmp_path):
    model = save(Setup(kind, "qwen3"), tmp_path / "model", 0)
    prompts = [prompt_of(0, number, 0).tokens for number in range(NUM_PROMPTS)]
    expected: list[list[int]] = []

    async def builtin(stage: Stage) -> None:
        leases = [stage.begin(prompt=list(one), max_tokens=NUM_TOKENS, sampling=GREEDY) for one in prompts]
        expected.extend(await answers(stage, leases))

    builtin_stage.play(builtin, model, kv_tokens=NUM_PROMPTS * 512)

    def engine(name: str) -> ServedEngine:
        log = str(tmp_path / f"{name}.log")
        return ServedEngine(kind, ServedConfig(model=str(model), python=python_of(kind), log=log, kv_tokens=16_384))

    engines = {name: engine(name) for name in ("a", "b")}
    scenario = Scenario(
        engines,
        lambda prompt, _: expected[prompts.index(prompt)],
        num_kills=NUM_KILLS,
        num_tokens=NUM_TOKENS,
        patience_s=1700.0,
    )
    run(scenario.play(tmp_path / "run"), timeout_s=1700.0)
    assert scenario.num_killed == NUM_KILLS
