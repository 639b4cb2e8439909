"""Models and data sets by a path, or by a name on the hub: what is asked for there, and what is not."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from polyrl.config import places
from polyrl.config.recipe_files import load_recipe
from polyrl.errors import ConfigError


class Fetching:
    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, []

    def __call__(self, name: str, kind: places.RepoKind, patterns: Sequence[str]) -> str:
        self.asked.append((name, kind))
        return str(self.folder)


def test_names_of_the_hub_become_directories_and_paths_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    fetch = Fetching(tmp_path)
    for path in ("models/tiny", "./a/b", "/a/b", "tiny", "a/b/c", "../a/b"):
        assert places.local_model(path, "model.path", fetch) == path
    for place in ("arithmetic", "data/rows.jsonl", "models/rows", "/data/rows#test", "rows.csv"):
        assert places.local_data(place, "data.source", fetch) == place
    assert fetch.asked == []
    assert places.local_model("Qwen/Qwen3-0.6B", "model.path", fetch) == str(tmp_path)
    assert places.local_data("openai/gsm8k/main#test", "data.source", fetch) == f"{tmp_path}/main#test"
    assert places.local_data("openai/gsm8k", "data.source", fetch) == str(tmp_path)
    assert fetch.asked == [("Qwen/Qwen3-0.6B", "model"), ("openai/gsm8k", "dataset"), ("openai/gsm8k", "dataset")]


def test_all_that_a_recipe_names_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings = ["model.path=org/model", "algorithm.kl=loss", "algorithm.reference=org/reference", "data.reward=math"]
    recipe = load_recipe("arithmetic", [*settings, "data.source=org/data#train", "data.validation=org/data#test"])
    found = places.with_local_places(recipe, fetch := Fetching(tmp_path))
    assert (found.model.path, found.algorithm.reference) == (str(tmp_path), str(tmp_path))
    assert (found.data.source, found.data.validation) == (f"{tmp_path}#train", f"{tmp_path}#test")
    assert len(fetch.asked) == 4


def test_what_the_hub_does_not_give_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def fetch(name: str, kind: places.RepoKind, patterns: Sequence[str]) -> str:
        raise ConnectionError("no route to the hub,\nof all hosts")

    with pytest.raises(ConfigError) as error:
        places.local_model("org/model", "model.path", fetch)
    assert str(error.value) == (
        "model.path: org/model: not here, and the Hugging Face hub does not give it: ConnectionError: no route to the "
        "hub, of all hosts; expected a path, or a name that can be fetched"
    )


def test_a_model_that_shipped_recipes_begin_with_is_not_asked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A first try without the model ended with five lines of the hub's client about a connection."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        places.local_model("models/arithmetic", "model.path", Fetching(tmp_path))
    assert str(error.value) == (
        "model.path: models/arithmetic: not here; `polyrl data model arithmetic --out models/arithmetic` makes it"
    )


def test_others_are_told_the_name_and_not_where_it_lies_here():
    snapshot = f"/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/{'a' * 40}"
    assert places.shown_model(snapshot) == "Qwen/Qwen3-0.6B"
    assert places.shown_model("/models/mine") == "/models/mine"


@contextmanager
def a_hub(files: dict[str, bytes]) -> Iterator[str]:
    """As far as `snapshot_download` looks at one: `org/model` and `org/data` have these files."""
    commit = "a" * 40

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "/resolve/" in self.path:
                data = files[self.path.partition(f"/resolve/{commit}/")[2]]
            elif "/tree/" in self.path:
                one = {"type": "file", "oid": "b" * 40}
                listed = [{**one, "path": name, "size": len(its)} for name, its in files.items()]
                data = json.dumps(listed).encode()
            else:
                siblings = [{"rfilename": name} for name in files]
                data = json.dumps({"id": "org/model", "sha": commit, "siblings": siblings}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{sha1(data).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def ask(endpoint: str, home: Path, call: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own: the library reads its settings once."""
    code = f"from polyrl.config import places\ntry: print({call})\nexcept Exception as error: print('refused:', error)"
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=home, check=True, timeout=100
    )


def test_a_hub_that_can_be_reached_gives_a_model_and_a_data_set(tmp_path: Path):
    files = {"config.json": b"{}", "model.safetensors": b"w", "model.bin": b"no", "main/train.jsonl": b'{"a":1}'}
    with a_hub(files) as endpoint:
        folder = Path(ask(endpoint, tmp_path, "places.local_model('org/model', 'model.path')").stdout.strip())
        assert {one.name for one in folder.iterdir()} == {"config.json", "model.safetensors"}
        place = ask(endpoint, tmp_path, "places.local_data('org/data/main#train', 'data.source')").stdout.strip()
    assert place.endswith("/main#train") and Path(place.removesuffix("#train")).joinpath("train.jsonl").is_file()
    gone = ask("http://127.0.0.1:1", tmp_path, "places.local_model('org/other', 'model.path')").stdout
    assert gone.startswith("refused: model.path: org/other: not here, and the Hugging Face hub does not give it: ")
    assert gone.count("\n") == 1


@pytest.mark.parametrize("key", ["--model", "algorithm.reference"])
def test_a_folder_without_a_config_is_no_model_directory(tmp_path, key):
    with pytest.raises(ConfigError) as caught:
        places.check_model_dir(str(tmp_path), key)
    expected = f"{key}: {tmp_path}: no config.json there; expected a Hugging Face model directory"
    assert str(caught.value) == expected
    (tmp_path / "config.json").write_text("{}")
    places.check_model_dir(str(tmp_path), key)
