"""A machine is looked over before a run: each check says what it saw, and what is wrong decides the exit code."""

import contextlib
import json
import socket
from pathlib import Path

import pytest

from polyrl.cli.main import main
from polyrl.config.recipe import ArithmeticTask
from polyrl.run.machine import check_machine
from polyrl.starters.arithmetic import make_model
from polyrl.wire.control import DEFAULT_PORT


def test_every_check_says_what_it_saw(tmp_path: Path):
    found = {one.name: one for one in check_machine(tmp_path / "runs" / "first")}
    assert found.keys() >= {
        "python", "processor", "devices", "disk", "shared memory", "open files", "port", "clock", "extra train",
        "sandbox", "engine vllm", "engine sglang",
    }  # fmt: skip
    assert all(one.what for one in found.values())
    assert all(one.do for one in found.values() if one.verdict != "ok")
    assert str(tmp_path) in found["disk"].what
    assert "torch" in found["devices"].what


def test_a_port_that_is_taken_is_told_and_stops_nobody(tmp_path: Path):
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # somebody else has it, which is as good
            taken.bind(("127.0.0.1", DEFAULT_PORT))
        found = {one.name: one for one in check_machine(tmp_path)}
    assert found["port"].verdict == "missing" and "is taken" in found["port"].what


def test_a_recipe_that_does_not_fit_is_wrong_with_a_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[model]\npath = "./nowhere"\n[data]\nsource = "arithmetic"\nprompts_per_step = 4\n')
    assert main(["doctor", "--recipe", str(file), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (recipe,) = [one for one in told["checks"] if one["name"] == "recipe"]
    assert told["wrong"] and recipe["verdict"] == "wrong" and "model.path" in recipe["what"]


def test_a_recipe_that_fits_is_told_with_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tmp_path / "model"
    make_model(model, seed=0, task=ArithmeticTask(), num_steps=1)
    file = tmp_path / "mine.toml"
    words = f'name = "mine"\n[model]\npath = "{model}"\n[data]\nsource = "arithmetic"\nprompts_per_step = 4\n'
    file.write_text(words + "[rollout]\nmax_new_tokens = 16\n[rounds]\nsamples_per_prompt = 2\n")
    code = main(["doctor", "--recipe", str(file), "--json"])
    told = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in told["checks"]}
    assert found["recipe"]["verdict"] == "ok", found["recipe"]
    for word in ("model", "optimizer", "packs of", "KV cache", "this machine has"):
        assert word in found["memory"]["what"], word
    assert "for checkpoints (2 are kept" in found["room on disk"]["what"]
    assert code == (1 if told["wrong"] else 0)


def test_a_port_that_the_recipe_names_and_room_that_is_not_there_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = tmp_path / "model"
    make_model(model, seed=0, task=ArithmeticTask(), num_steps=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        file = tmp_path / "mine.toml"
        words = f'name = "mine"\n[model]\npath = "{model}"\n[data]\nsource = "arithmetic"\nprompts_per_step = 4\n'
        words += "[rollout]\nmax_new_tokens = 16\n[rounds]\nsamples_per_prompt = 2\n"
        words += f"[manager]\nport = {taken.getsockname()[1]}\n[track]\nsamples_gb = 1000000\n"
        words += "[train]\nmicro_batch_tokens = 900000000\n"
        file.write_text(words)
        assert main(["doctor", "--recipe", str(file), "--json"]) == 1
    wrong = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"] if one["verdict"] == "wrong"}
    assert wrong.keys() >= {"port", "room on disk", "memory"}
    assert wrong["port"]["what"].startswith("manager.port: port ") and wrong["memory"]["do"]
