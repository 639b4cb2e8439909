"""The servers' own speculation: the flags that the key becomes, and what is refused."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engines.standins import save_model

from polyrl.engines.engine import EngineError
from polyrl.engines.served.http import Http
from polyrl.engines.served.server import ServedConfig
from polyrl.engines.served.sglang import SglangServer
from polyrl.engines.served.vllm import VllmServer


def flags(server: type[VllmServer] | type[SglangServer], folder: Path, **settings: Any) -> list[str]:
    config = ServedConfig(model=str(save_model(folder / "model")), **settings)
    return server(Http("http://127.0.0.1:9", "key"), config).command(9).argv


def test_vllm_gets_a_speculative_config(tmp_path):
    argv = flags(VllmServer, tmp_path, speculation="ngram", draft_tokens=7, device="gpu")
    said = json.loads(argv[argv.index("--speculative-config") + 1])
    assert said == {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    argv = flags(VllmServer, tmp_path, speculation="suffix", device="gpu")
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


def test_vllm_on_the_cpu_is_refused_in_a_line(tmp_path):
    with pytest.raises(EngineError, match="wrote no token with it on the CPU; expected off, or a GPU"):
        flags(VllmServer, tmp_path, speculation="ngram", device="cpu")
