"""The servers' own speculation: the flags that the key becomes, what is refused, vLLM's log-probabilities."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.builtin.reference import TOLERANCE
from tests.builtin.stage import GREEDY, answers
from tests.engines.servers import Setup, play, running
from tests.engines.standins import save_model

from polyrl.engines.contract import Stage
from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.served.http import Http
from polyrl.engines.served.server import ServedConfig
from polyrl.engines.served.sglang import SglangServer
from polyrl.engines.served.vllm import VllmServer
from polyrl.ids import Version
from polyrl.wire.frames import Sampling


def flags(server: type[VllmServer] | type[SglangServer], folder: Path, **settings: Any) -> list[str]:
    config = ServedConfig(model=str(save_model(folder / "model")), **settings)
    return server(Http("http://127.0.0.1:9", "key"), config).command(9).argv


def test_vllm_gets_a_speculative_config(tmp_path):
    argv = flags(VllmServer, tmp_path, speculation="ngram", draft_tokens=7)
    said = json.loads(argv[argv.index("--speculative-config") + 1])
    assert said == {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    argv = flags(VllmServer, tmp_path, speculation="suffix")
    assert json.loads(argv[argv.index("--speculative-config") + 1])["method"] == "suffix"
    assert "--speculative-config" not in flags(VllmServer, tmp_path)


def test_sglang_gets_its_algorithm(tmp_path):
    argv = flags(SglangServer, tmp_path, speculation="ngram", draft_tokens=7, device="gpu")
    assert argv[argv.index("--speculative-algorithm") + 1] == "NGRAM"
    assert argv[argv.index("--speculative-num-draft-tokens") + 1] == "8", "with the token before the draft"
    assert "--speculative-algorithm" not in flags(SglangServer, tmp_path, device="gpu")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"speculation": "suffix", "device": "gpu"}, "no suffix drafts; expected off or ngram"),
        ({"speculation": "ngram", "device": "cpu"}, "not tested on the CPU; expected off, or a GPU"),
    ],
)
def test_what_sglang_cannot_do_is_refused_in_a_line(tmp_path, settings, said):
    with pytest.raises(EngineError, match=said):
        flags(SglangServer, tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"speculation": "ngram", "url": "http://127.0.0.1:9"}, "the server runs already, expected off"),
        ({"draft_tokens": 33}, "<= 32"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, said):
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert({"model": "x", **settings}, ServedConfig)


@pytest.mark.engines
@pytest.mark.timeout(1800)
def test_vllm_with_drafts_reports_the_log_probabilities_of_the_model(tmp_path):
    """Greedy words are the model's; sampled ones have its log-probabilities, also after an install."""
    prompt = [17, 301, 42, 9, 77] * 8
    with running(Setup("vllm", "qwen3"), tmp_path, speculation="ngram") as server:

        async def script(stage: Stage) -> None:
            for version in (1, 2):
                await stage.engine.install(Weights(Version(version), copy=server.copy(version)))
                ways = [GREEDY, Sampling(temperature=0.2, ignore_eos=True), Sampling(temperature=1.0, ignore_eos=True)]
                leases = [
                    stage.begin(prompt=prompt, max_tokens=200, sampling=one, seed=at) for at, one in enumerate(ways)
                ]
                await answers(stage, leases)
                for lease, one in zip(leases, ways, strict=True):
                    heard = stage.sink.texts[lease], stage.sink.logprobs[lease]
                    apart = server.reference(version).error(prompt, *heard, temperature=one.temperature or 1.0)
                    assert apart < 8 * TOLERANCE, one

        play(server, script)
        assert "speculative_config" in (tmp_path / "vllm-qwen3-tp1.log").read_text()
