"""Streams of OpenAI's client that are cut by kills, again and again: their text is the undisturbed one."""

from pathlib import Path
from typing import Any

import pytest
from tests.builtin.tiny_models import save_tiny
from tests.serving import ServedFleet, save_tokenizer, served

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def kill_who_writes(fleet: ServedFleet) -> str:
    """SIGKILL the worker that holds the answer."""
    name = next(one["name"] for one in fleet.status()["workers"] if one["running"])
    fleet.kill_worker(name)
    return name


def read_and_kill(fleet: ServedFleet, ask: dict[str, Any], kill_at: list[int], *settings: str) -> str:
    """Stream an answer, and kill its worker at so many tokens; where settings are given, start another."""
    text, num_tokens = "", 0
    extra = {"return_token_ids": True, "ignore_eos": True}
    for chunk in fleet.client(timeout=120.0).completions.create(**ask, stream=True, extra_body=extra):
        choice: Any = chunk.choices[0]
        text += choice.text
        num_tokens += len(choice.token_ids)
        if kill_at and num_tokens >= kill_at[0]:
            kill_at.pop(0)
            name = kill_who_writes(fleet)
            if settings:
                fleet.start_byte_worker(name, *settings)
    assert not kill_at, f"only {num_tokens} tokens came"
    return text


def test_ten_kills_in_one_stream_of_a_fleet_that_writes_bytes(tmp_path: Path):
    pace = "tokens_per_s=200"
    ask: dict[str, Any] = {"model": "bytes", "prompt": "go on", "max_tokens": 3000, "seed": 4}
    with served(tmp_path, save_tokenizer(tmp_path / "bytes")) as fleet:
        for name in ("a", "b", "c"):
            fleet.start_byte_worker(name, pace)
        fleet.until_active(3)
        disturbed = read_and_kill(fleet, ask, list(range(200, 2200, 200)), pace)
        whole = fleet.client(timeout=120.0).completions.create(**ask, extra_body={"ignore_eos": True})
        assert disturbed == whole.choices[0].text
        fleet.until_idle()
        assert fleet.verified()["samples"]["moves"]["lost"] == 10


def test_a_real_models_stream_goes_on_with_the_same_text_when_its_worker_is_killed_twice(tmp_path: Path):
    model = save_tiny("llama", tmp_path / "tiny", vocab_size=259, eos_token_id=258, max_position_embeddings=8192)
    save_tokenizer(model)
    ask: dict[str, Any] = {"model": "tiny", "prompt": "go on", "max_tokens": 4000, "seed": 4}
    with served(tmp_path, model) as fleet:
        for name in ("a", "b", "c"):
            fleet.start_worker(name, "--engine", "builtin", "--model", str(model))
        fleet.until_active(3)
        disturbed = read_and_kill(fleet, ask, [500, 2000])
        whole = fleet.client(timeout=120.0).completions.create(**ask, extra_body={"ignore_eos": True})
        assert disturbed == whole.choices[0].text
        assert fleet.verified()["samples"]["moves"]["lost"] == 2
