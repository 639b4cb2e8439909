"""`polyrl weights serve` and `pull`, as processes: a version goes from one directory to another."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.weights.stage import layout_of, weights

from polyrl.weights import folder
from polyrl.weights.chunks import table_of
from polyrl.weights.manifest import AdapterFacts, Manifest, Spec, lay_out

TOKEN = "a token of sixteen characters and more".replace(" ", "-")
COMMAND = (sys.executable, "-m", "polyrl", "weights")
HERE = ("--interface", "127.0.0.0/8", "--json")


def environment() -> dict[str, str]:
    return {**os.environ, "POLYRL_TOKEN": TOKEN}


@contextmanager
def serving(directory: Path):
    process = subprocess.Popen(
        [*COMMAND, "serve", str(directory), *HERE], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(10)


def pulling(*arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    env = {**environment(), "POLYRL_TOKEN": token}
    return subprocess.run(
        [*COMMAND, "pull", *arguments, *HERE], capture_output=True, text=True, timeout=60, check=False, env=env
    )


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = weights(3)
    manifest = Manifest(7, layout_of(), table_of(data, 8192), "ab" * 32)
    directory = tmp_path_factory.mktemp("weights") / "version"
    folder.write(directory, manifest, data)
    return directory


def test_a_version_is_served_and_pulled_as_it_is(version, tmp_path):
    with serving(version) as offer:
        out = tmp_path / "pulled"
        done = pulling(*offer["addresses"], "--digest", offer["digest"], "--out", str(out))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["version"] == 7
        manifest, data = folder.read(out, offer["digest"])
        assert manifest == folder.read_manifest(version)
        assert bytes(data) == weights(3)
        again = pulling(*offer["addresses"], "--out", str(out))
        assert again.returncode == 2
        assert "is there already" in again.stderr
        wrong = pulling(*offer["addresses"], token="another-token-of-some-length")
        assert wrong.returncode == 1
        assert "does not hold the run's key" in wrong.stderr and "Traceback" not in wrong.stderr


def test_an_adapter_is_served_and_pulled_with_what_it_changes(tmp_path):
    layout = lay_out([Spec("l.lora_A.weight", "float32", (2, 8)), Spec("l.lora_B.weight", "float32", (8, 2))])
    data = bytes(range(128))
    manifest = Manifest(3, layout, table_of(data), "", adapter=AdapterFacts("0" * 64, "float32", 2.0))
    folder.write(tmp_path / "adapter", manifest, data)
    with serving(tmp_path / "adapter") as offer:
        assert offer["digest"] == manifest.digest
        done = pulling(*offer["addresses"], "--out", str(tmp_path / "pulled"))
        assert done.returncode == 0, done.stderr
    pulled, found = folder.read(tmp_path / "pulled", manifest.digest)
    assert pulled == manifest and bytes(found) == data


def test_what_cannot_be_is_said_in_a_line(tmp_path):
    for arguments, said in [
        ((), "polyrl: error: weights pull: no address"),
        (("localhost",), "polyrl: error: weights pull: 'localhost'; expected HOST:PORT"),
        (("127.0.0.1:1",), "polyrl: not pulled: no source answers"),
    ]:
        done = pulling(*arguments)
        assert done.returncode == (2 if "error" in said else 1)
        assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_version_that_nobody_offers_did_not_arrive(version):
    with serving(version) as offer:
        missing = pulling(*offer["addresses"], "--digest", "ab" * 32)
    assert missing.returncode == 1
    assert missing.stderr == f"polyrl: not pulled: no source offers {'ab' * 32}\n"


@pytest.mark.parametrize(
    "wrong",
    [
        ("--digest", "ab"),
        ("--deadline", "0"),
        ("--deadline", "nan"),
        ("--streams", "0"),
        ("--egress-mb-s", "nan"),
        ("--interface[0]", "bogus"),
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_is_bad_input(wrong):
    answer = pulling("127.0.0.1:1", wrong[0].removesuffix("[0]"), wrong[1])
    assert answer.returncode == 2
    assert answer.stderr.startswith(f"polyrl: error: {wrong[0]}: ") and answer.stderr.count("\n") == 1
