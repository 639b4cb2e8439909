"""Versions into real servers: vLLM and SGLang, tied and untied, whole and sliced. Every server serves all its tests."""

import asyncio
import statistics
from collections.abc import Iterator

import pytest
import torch
from tests.builtin.reference import TOLERANCE
from tests.engines.servers import CONTEXT, Running, Setup, play, running
from tests.weights.copies import copy_of

from polyrl.engines.contract import EngineContract, Stage
from polyrl.engines.engine import EngineError, Weights
from polyrl.ids import LeaseId, Version
from polyrl.wire.frames import Sampling

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SETUPS = [
    Setup("vllm", "qwen3"),
    Setup("vllm", "llama", tied=True, num_slices=2),
    Setup("sglang", "qwen3"),
    Setup("sglang", "llama", tied=True),
]
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
PROMPT = EngineContract.prompt


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(request.param, tmp_path_factory.mktemp("server")) as found:
        yield found


async def install(stage: Stage, server: Running, version: int) -> None:
    with server.copy(version) as copy:
        await stage.engine.install(Weights(Version(version), copy=copy))


def check_words(server: Running, stage: Stage, lease: LeaseId, *, logprobs: bool = True) -> None:
    """Every token is what the version that it is stamped with would have written there."""
    text, versions = stage.sink.texts[lease], stage.sink.versions[lease]
    assert versions == sorted(versions)
    for version in set(versions):
        words = server.reference(version).distributions(PROMPT, text)
        at = torch.tensor([place for place, one in enumerate(versions) if one == version])
        chosen = words[at].gather(1, torch.tensor(text)[at].unsqueeze(1)).squeeze(1)
        assert (words[at].max(1).values - chosen).max() < TOLERANCE
        if logprobs:
            ours = torch.tensor(stage.sink.logprobs[lease])[at]
            assert (ours - chosen).abs().max() < TOLERANCE


def test_answers_become_the_new_versions_and_only_then_are_its_tokens_called_so(server: Running):
    async def script(stage: Stage) -> None:
        for version in (1, 2, 3, 4):
            await install(stage, server, version)
            lease = stage.begin(sampling=GREEDY, max_tokens=24)
            await stage.sink.end_of(lease)
            assert stage.sink.texts[lease] == server.reference(version).greedy(PROMPT, 24)
            assert set(stage.sink.versions[lease]) == {version}
            check_words(server, stage, lease)

    play(server, script)


def test_twenty_versions_in_a_row_while_samples_run(server: Running, capsys: pytest.CaptureFixture[str]):
    pauses: list[float] = []

    async def script(stage: Stage) -> None:
        await install(stage, server, 10)
        leases: list[LeaseId] = []
        for version in range(11, 31):
            while sum(one not in stage.sink.ends for one in leases) < 4:
                leases.append(stage.begin(sampling=GREEDY, max_tokens=CONTEXT - 100))
                await stage.sink.some_of(leases[-1])
            await install(stage, server, version)
            pauses.append(stage.engine.last_install_s)  # pyright: ignore[reportAttributeAccessIssue]
            running_ones = [one for one in leases if one not in stage.sink.ends]
            if running_ones:  # something is written by every version
                one = running_ones[0]
                await stage.sink.until(
                    lambda one=one, version=version: one in stage.sink.ends or stage.sink.versions[one][-1] == version
                )
        for lease in leases:
            assert await stage.sink.end_of(lease) == "length"
            assert len(stage.sink.texts[lease]) == CONTEXT - 100
            check_words(server, stage, lease)
        assert len({version for lease in leases for version in stage.sink.versions[lease]}) >= 20
        assert stage.engine.num_misstamped == 0  # pyright: ignore[reportAttributeAccessIssue]

    play(server, script)
    with capsys.disabled():
        print(
            f"\n{server.setup}: 20 installs with samples running: stood still {statistics.median(pauses) * 1e3:.0f} ms "
            f"in the middle, {max(pauses) * 1e3:.0f} ms at most"
        )


def test_a_cache_that_is_kept_goes_on_over_an_install(server: Running):
    prompt = [41, 42, 43]  # which no test before has put into the server's cache of prompts

    async def script(stage: Stage) -> None:
        await install(stage, server, 31)
        lease = stage.begin(prompt=prompt, sampling=GREEDY, max_tokens=600)
        await stage.sink.some_of(lease)
        await install(stage, server, 32)
        assert await stage.sink.end_of(lease) == "length"
        assert set(stage.sink.versions[lease]) == {31, 32}
        assert stage.engine.num_misstamped == 0  # pyright: ignore[reportAttributeAccessIssue]
        first = stage.sink.versions[lease].index(Version(32))
        assert stage.sink.texts[lease][:first] == server.reference(31).greedy(prompt, first)

    play(server, script, after_install="keep")


def test_a_version_from_a_directory_is_installed(server: Running):
    async def script(stage: Stage) -> None:
        await stage.engine.install(Weights(Version(40), folder=str(server.models[1])))
        assert await stage.text(sampling=GREEDY) == server.reference(1).greedy(PROMPT, 16)

    play(server, script)


def test_a_failed_install_says_why_in_a_line_and_the_old_version_runs_on(server: Running):
    state = dict(server.reference(0).model.state_dict())
    lacking = {name: one for name, one in state.items() if name != "model.norm.weight"}
    wide = {name: torch.cat((one, one)) if "down_proj" in name else one for name, one in state.items()}

    async def script(stage: Stage) -> None:
        await install(stage, server, 61)
        lease = stage.begin(sampling=GREEDY, max_tokens=CONTEXT - 100)
        await stage.sink.some_of(lease)
        for bad, why in (
            (copy_of(lacking, 62), "it has no model.norm.weight"),
            (copy_of({**state, "extra.weight": torch.zeros(4)}, 63), "which has no extra.weight"),
            (copy_of(wide, 64), "down_proj.weight has shape"),
            (server.copy(65, dtype="bfloat16"), "--dtype bfloat16"),
        ):
            with bad, pytest.raises(EngineError) as failure:
                await stage.engine.install(Weights(Version(bad.manifest.version), copy=bad))
            assert why in str(failure.value)
            assert "\n" not in str(failure.value)
        with pytest.raises(EngineError, match="version 66 has no known source"):
            await stage.engine.install(Weights(Version(66)))
        assert await stage.sink.end_of(lease) == "length"
        assert set(stage.sink.versions[lease]) == {61}
        check_words(server, stage, lease)
        assert stage.engine.health() is None
        assert await stage.text(sampling=GREEDY) == server.reference(61).greedy(PROMPT, 16)

    play(server, script)


def test_installs_that_nobody_waits_for_any_more_end_whole(server: Running):
    async def script(stage: Stage) -> None:
        await install(stage, server, 70)
        with server.copy(71) as copy:
            waiting = asyncio.create_task(stage.engine.install(Weights(Version(71), copy=copy)))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.wait([waiting])
            await install(stage, server, 72)
        assert await stage.text(sampling=GREEDY) == server.reference(72).greedy(PROMPT, 16)

    play(server, script)
