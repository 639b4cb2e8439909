"""Workers as processes, and by commands: both keep the contract of providers."""

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from polyrl.errors import ConfigError
from polyrl.providers.command import CommandProvider
from polyrl.providers.contract import ProviderContract
from polyrl.providers.local import LocalProvider
from polyrl.providers.provider import Provider, ProviderRun
from polyrl.providers.registry import make_provider, run_of

POLYRL = f"{shlex.quote(sys.executable)} -m polyrl"
LISTED = {  # a cloud in miniature: a folder of process ids
    "start": "mkdir -p {{cloud}} && (setsid {command} > {log} 2>&1 & echo $! > {{cloud}}/{name})",
    "list": "for one in {{cloud}}/*; do [ -f $one ] && kill -0 $(cat $one) 2>/dev/null && basename $one; done; true",
    "stop": "kill $(cat {{cloud}}/{name}) 2>/dev/null; rm -f {{cloud}}/{name}",
}


async def kill_by_place(provider: Provider, name: str) -> None:
    pid = re.search(r"\d+", (await provider.held())[name].place)
    assert pid is not None
    os.killpg(int(pid[0]), signal.SIGKILL)


class TestLocal(ProviderContract):
    def provider(self, run: ProviderRun) -> Provider:
        return LocalProvider(run)

    async def kill(self, provider: Provider, run: ProviderRun, name: str) -> None:
        await kill_by_place(provider, name)


class TestCommandThatRunsWhileItsWorkerDoes(ProviderContract):
    is_found_again = False

    def provider(self, run: ProviderRun) -> Provider:
        return CommandProvider(run, start="exec {command}", polyrl=POLYRL)

    async def kill(self, provider: Provider, run: ProviderRun, name: str) -> None:
        await kill_by_place(provider, name)


class TestCommandWithAList(ProviderContract):
    def provider(self, run: ProviderRun) -> Provider:
        cloud = shlex.quote(str(run.folder / "cloud"))
        start, listed, stop = (LISTED[key].replace("{{cloud}}", cloud) for key in ("start", "list", "stop"))
        return CommandProvider(run, start, listed, stop, polyrl=POLYRL)

    async def kill(self, provider: Provider, run: ProviderRun, name: str) -> None:
        os.kill(int((run.folder / "cloud" / name).read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"start": "ssh {host} {command}"}, "hosts is empty"),
        ({"start": "ssh {machine} {command}", "hosts": ["a"]}, "got {machine}, expected one of name"),
        ({"start": "ssh a"}, "has no {command}"),
        ({"start": "x {command}", "list": "y"}, "stop: missing"),
        ({"start": "x {command"}, "brace"),
        ({}, "start: missing"),
        ({"start": "x {command}", "strat": 1}, "strat"),
    ],
)
def test_a_template_that_cannot_work_is_one_line(args: dict[str, object], why: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape(why)):
        make_provider("command", args, run_of(tmp_path, ends_with_us=True))


def test_a_provider_that_is_unknown_or_lacks_a_method_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r'fleet.provider: unknown name "slrum".*did you mean slurm'):
        make_provider("slrum", {}, run_of(tmp_path, ends_with_us=True))
    with pytest.raises(ConfigError, match="has no method check"):
        make_provider("pathlib:Path", {}, run_of(tmp_path, ends_with_us=True))


def test_the_name_of_a_run_is_its_own_wherever_it_is_asked_from(tmp_path: Path):
    ids = [run_of(tmp_path / name, ends_with_us=True).id for name in ("first", "First run!", "x" * 99)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch("[a-z0-9-]{1,40}", one) for one in ids)
    assert run_of(tmp_path / "first", ends_with_us=False).id == ids[0]
