"""A judge and a reward model behind real servers of vLLM and SGLang, with tiny random models."""

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.builtin.tiny_models import save_tiny
from tests.engines.servers import START_S, python_of
from tests.rewards.test_reward_model import chat, references, save
from tests.serving import save_tokenizer

from polyrl.engines.served.process import free_port
from polyrl.rewards.judge import Judge
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput, RewardStops
from polyrl.rewards.reward_model import RewardModel

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
KEY = "the-key-of-the-tests"


def given(answer: str) -> RewardInput:
    return RewardInput("2+2=", answer, "4", {}, "stop", 2)


@contextmanager
def vllm(model: Path, *flags: str) -> Iterator[str]:
    """A server of a model on the CPU; its address."""
    port = free_port()
    argv = [python_of("vllm"), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "tiny"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, "--dtype", "float32", "--enforce-eager"]
    more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    more |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with _running([*argv, *flags], more, port, model / "server.log") as url:
        yield url


@contextmanager
def sglang(model: Path) -> Iterator[str]:
    """A server of a classifier on the CPU; its address."""
    port = free_port()
    argv = [python_of("sglang"), "-m", "sglang.launch_server", "--model-path", str(model), "--is-embedding"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, "--dtype", "float32", "--device", "cpu"]
    argv += [
        "--disable-cuda-graph",
        "--disable-overlap-schedule",
        "--disable-radix-cache",
        "--max-total-tokens",
        "1024",
    ]
    argv += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.8"]
    more = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "OMP_NUM_THREADS": "1"}
    with _running(argv, more, port, model / "server.log") as url:
        yield url


@contextmanager
def _running(argv: list[str], more: dict[str, str], port: int, log: Path) -> Iterator[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = kept | more | {"HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(argv, env=environment, stdout=output, stderr=output, process_group=0)
    try:
        _until_ready(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15.0)


def _until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < until, log.read_text()[-4000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
            if reply.status == 200:
                return
        time.sleep(0.5)


async def scores(kind: type[Judge] | type[RewardModel], *asked: RewardInput, **args: Any) -> list[Any]:
    made = kind(**args)
    await made.start()
    try:
        return await asyncio.gather(*(made(one) for one in asked), return_exceptions=True)
    finally:
        await made.close()


@pytest.fixture(scope="module")
def judge_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judge") / "server.log"


@pytest.fixture(scope="module")
def judge_url(judge_log: Path) -> Iterator[str]:
    """A model that writes letters by chance. Its words are nothing, and their form is what the schema makes of them."""
    folder = save_tiny(
        "qwen3", judge_log.parent, vocab_size=259, head_dim=32, max_position_embeddings=4096,
        eos_token_id=258, bos_token_id=None, pad_token_id=258,
    )  # fmt: skip
    save_tokenizer(folder)
    with vllm(folder, "--max-model-len", "4096", "--max-num-seqs", "16") as url:
        yield url


def test_a_real_server_holds_even_a_random_judge_to_the_form_of_a_verdict(
    judge_url: str, judge_log: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("POLYRL_REWARDS", '{"timeout_s": 300}')
    args = {"url": f"{judge_url}/v1", "api_key_env": "JUDGE_KEY", "timeout_s": 120, "reply_tokens": 2000}
    found = asyncio.run(scores(Judge, *(given(str(number)) for number in range(4)), temperature=1.0, **args))
    assert all(isinstance(one, Reward) and 0 <= one.score <= 10 for one in found), found
    log = judge_log.read_text()
    assert '"POST /v1/chat/completions HTTP/1.1" 200' in log and "400 Bad Request" not in log, "it knows the schema"


def test_a_real_server_that_does_not_know_the_key_or_the_model_ends_the_run(
    judge_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY", "another")
    with pytest.raises(RewardStops, match=r"/v1/models answered 401"):
        asyncio.run(scores(Judge, given("4"), url=f"{judge_url}/v1", api_key_env="JUDGE_KEY"))
    monkeypatch.setenv("JUDGE_KEY", KEY)
    (failed,) = asyncio.run(scores(Judge, given("4"), url=f"{judge_url}/v1", model="gpt", api_key_env="JUDGE_KEY"))
    assert isinstance(failed, RewardStops) and "answered 404" in str(failed) and "`gpt`" in str(failed)


def test_an_answer_that_is_too_long_for_a_real_server_fails_alone(judge_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    (failed,) = asyncio.run(scores(Judge, given("x" * 9000), url=f"{judge_url}/v1", api_key_env="JUDGE_KEY"))
    assert isinstance(failed, RewardFailed) and "answered 400" in str(failed)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_real_server_classifies_as_transformers_does(
    tmp_path: Path, num_labels: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("POLYRL_REWARDS", '{"timeout_s": 120}')
    folder = save(tmp_path, "qwen3", num_labels=num_labels, head_dim=32)
    answers = ["4", "five, I would say", "it is four " * 4]
    label = {} if num_labels == 1 else {"label": 1}
    ours = asyncio.run(scores(RewardModel, *map(given, answers), path=str(folder), **label))
    with vllm(folder, "--runner", "pooling", "--max-model-len", "128") as url:
        theirs = asyncio.run(scores(RewardModel, *map(given, answers), url=url, api_key_env="JUDGE_KEY", **label))
        if num_labels == 1:
            texts = asyncio.run(scores(RewardModel, given("4"), url=url, api_key_env="JUDGE_KEY", form="text"))
            (expected,) = references(folder, ["2+2=4"])
            assert texts[0].score == pytest.approx(expected[0], abs=1e-3)
            expected = [row[0] for row in references(folder, [chat(one) for one in answers])]
            assert [one.score for one in theirs] == pytest.approx(expected, abs=1e-3)
        long = asyncio.run(scores(RewardModel, given("x" * 900), url=url, api_key_env="JUDGE_KEY", **label))
        assert isinstance(long[0], Reward), long
    assert [one.score for one in theirs] == pytest.approx([one.score for one in ours], abs=1e-3)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_real_sglang_server_classifies_as_transformers_does(
    tmp_path: Path, num_labels: int, monkeypatch: pytest.MonkeyPatch
):
    """With Llama: to the heads of Qwen3, SGLang 0.5.23 adds a bias that no weights fill."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("POLYRL_REWARDS", '{"timeout_s": 120}')
    folder = save(tmp_path, "llama", num_labels=num_labels)
    answers = ["4", "five, I would say", "it is four " * 4]
    label = {} if num_labels == 1 else {"label": 1}
    args = {"server": "sglang", "model": "tiny", "api_key_env": "JUDGE_KEY", **label}
    with sglang(folder) as url:
        theirs = asyncio.run(scores(RewardModel, *map(given, answers), url=url, **args))
        (long,) = asyncio.run(scores(RewardModel, given("x" * 900), url=url, **args))
        (stopped,) = asyncio.run(scores(RewardModel, given("4"), url=url, **{**args, "api_key_env": "HOME"}))
    logits = references(folder, [f"2+2={one}" for one in answers])
    expected = [row[0] for row in logits] if num_labels == 1 else [_share(row, 1) for row in logits]
    assert [one.score for one in theirs] == pytest.approx(expected, abs=1e-3), theirs
    assert isinstance(long, RewardFailed) and "answered 400" in str(long), "it cuts no input by itself"
    assert isinstance(stopped, RewardStops) and "answered 401" in str(stopped)


def _share(logits: list[float], label: int) -> float:
    """The softmax of one label."""
    return math.exp(logits[label]) / math.fsum(map(math.exp, logits))
