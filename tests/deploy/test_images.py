"""The Dockerfiles: what they copy is there, what they install exists, what they run is a command of ours."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from tests.deploy.commands import parsed

from polyrl.engines.served import versions

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "docker").glob("*.Dockerfile"))


def instructions(file: Path) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", file.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def only(file: Path, name: str) -> str:
    [found] = [rest for one, rest in instructions(file) if one == name]
    return found


def test_there_is_one_for_the_trainer_and_one_for_workers():
    assert [file.name for file in FILES] == ["trainer.Dockerfile", "worker.Dockerfile"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_copied_is_there_and_is_all_that_a_build_of_the_package_reads(file: Path):
    copied = [one for name, rest in instructions(file) if name == "COPY" for one in shlex.split(rest)[:-1]]
    assert all((ROOT / one).exists() for one in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    read = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    read |= {Path(one).parts[0] for one in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert read <= set(copied)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_extras_exist(file: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    text = file.read_text(encoding="utf-8")
    named = re.findall(r"'\.\[([a-z,]+)\]'|EXTRAS=([a-z,]+)", text)
    extras = {one for pair in named for one in "".join(pair).split(",")}
    assert extras and extras <= set(project["project"]["optional-dependencies"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_command_is_one_of_ours(file: Path):
    words = [*json.loads(only(file, "ENTRYPOINT")), *json.loads(only(file, "CMD"))]
    command = words[words.index("polyrl") + 1 :]
    if "--help" in command:
        with pytest.raises(SystemExit, match=r"^0$"):
            parsed(command)
    else:
        parsed(command)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_runs_as_root(file: Path):
    assert only(file, "USER") == "1000"


def test_the_image_of_vllm_is_of_the_version_that_is_tested():
    text = (ROOT / "deploy" / "docker" / "worker.Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"vllm/vllm-openai:v(\S+)", text) == [versions.VLLM]
