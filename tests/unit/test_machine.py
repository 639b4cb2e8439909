"""A machine is looked over before a run: each check says what it saw, and what is wrong decides the exit code."""

import json
import socket
from pathlib import Path

import pytest

from polyrl.cli.main import main
from polyrl.run.machine import check_machine
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
        try:
            taken.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError:
            pass  # somebody else has it, which is as good
        found = {one.name: one for one in check_machine(tmp_path)}
    assert found["port"].verdict == "missing" and "is taken" in found["port"].what


def test_a_recipe_that_does_not_fit_is_wrong_with_a_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npath = "./nowhere"\n[data]\nsource = "arithmetic"\n')
    assert main(["doctor", "--recipe", str(file), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (recipe,) = [one for one in told["checks"] if one["name"] == "recipe"]
    assert told["wrong"] and recipe["verdict"] == "wrong" and "model.path" in recipe["what"]


def test_a_recipe_that_fits_is_told_with_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = str(tmp_path / "model")
    assert main(["data", "model", "arithmetic", "--out", model]) == 0
    file = tmp_path / "mine.toml"
    file.write_text(f'[model]\npath = "{model}"\n[data]\nsource = "arithmetic"\n')
    capsys.readouterr()
    code = main(["doctor", "--recipe", str(file), "--json"])
    told = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in told["checks"]}
    assert found["recipe"]["verdict"] == "ok" and "training needs about" in found["memory"]["what"]
    assert code == (1 if told["wrong"] else 0)
