"""How a worker joins a run: as a command for people, and as the arguments of a process."""

import asyncio
import contextlib
import json
import os
import shlex
from collections.abc import Callable, Container
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from rich.text import Text

from polyrl.client import Fleet
from polyrl.config import build, load_toml
from polyrl.config.dump import inline
from polyrl.config.places import shown_model
from polyrl.config.plugins import is_own
from polyrl.config.recipe import ManagerSection, Recipe
from polyrl.engines import registry
from polyrl.engines.builtin.config import choose_device
from polyrl.engines.served.server import NAMES, ServerKind
from polyrl.errors import UserError
from polyrl.providers.provider import ProviderError
from polyrl.run.devices_in_use import DeviceSpan
from polyrl.run.encryption import encryption
from polyrl.weights.interfaces import listening_addresses

_REFRESH_EVERY_S = 2.0


def check_settings(recipe: Recipe) -> None:
    """Raise ConfigError for settings that would end a worker with an explanation only in its log."""
    engine = recipe.fleet.engine
    registry.check_settings(engine, recipe.fleet.settings, recipe.model.path)
    if recipe.fleet.workers and engine in NAMES:
        kind: ServerKind = "vllm" if engine == "vllm" else "sglang"
        registry.python_for(kind, recipe.fleet.engine_python, ("fleet.engine", "fleet.engine_python"))


def join_command(recipe: Recipe, run_dir: Path, url: str) -> str:
    """Return the command that joins this run from another machine."""
    joining = _joining(recipe, run_dir, from_elsewhere(url, recipe.manager), "builtin", shown_model(recipe.model.path))
    return shlex.join(["polyrl", *joining, f"dtype={recipe.model.dtype}"])


def join_command_of(run_dir: Path) -> str:
    """Return the command that joins a run of `polyrl train`; empty if it is not known here."""
    found = recipe_and_url(run_dir)
    return "" if found is None else join_command(found[0], run_dir, found[1])


def recipe_and_url(run_dir: Path) -> tuple[Recipe, str] | None:
    """Return the recipe of a run and the address of its manager; None if they are not known here."""
    try:
        recipe = build(load_toml(run_dir / "recipe.toml"), Recipe)
        url = json.loads((run_dir / "manager.json").read_text())["url"]
        tls = encryption(recipe.manager)
        return recipe, url if tls is None else tls.url(int(url.rpartition(":")[2]))
    except (UserError, OSError, ValueError, KeyError):
        return None


def worker_arguments(
    recipe: Recipe,
    run_dir: Path,
    url: str,
    name: str,
    width: int = 1,
    *,
    usd_per_hour: float = 0.0,
    shares_files: bool = True,
) -> list[str]:
    """Return the arguments of `polyrl` for a worker of this run, whose engine has `width` devices. A worker without
    `shares_files` does not see the run's directory: its token comes in an environment variable."""
    wanted = recipe.fleet
    arguments = ["worker", "--join", url, *_trust(recipe), "--engine", wanted.engine, "--model", recipe.model.path]
    arguments += ["--name", name]
    if shares_files:  # a run that goes on has the session, and the name with it
        files = {"--token-file": run_dir / "worker.token", "--session-file": run_dir / f"{name}.session"}
        arguments += [word for option, file in files.items() for word in (option, str(file.absolute()))]
    settings, flags = dict(wanted.settings), []
    if wanted.engine == "builtin":
        settings = {"dtype": recipe.model.dtype, **settings}
    elif is_own(wanted.engine):
        arguments += ["--modules", recipe.modules] if recipe.modules else []
    else:
        log_file = {"log": str(run_dir / "logs" / f"{name}-server.log")} if shares_files else {}
        settings = {**log_file, **settings}
        wide = ["--tensor-parallel-size", str(width)] if width > 1 else []
        flags = ["--", "--dtype", recipe.model.dtype, *wide, *settings.pop("flags", ())]  # the last of two holds
    if width > 1:
        arguments += ["--devices", str(width)]
    if recipe.parallelism.enabled:
        arguments.append("--planned")
    if wanted.engine_python:
        arguments += ["--engine-python", wanted.engine_python]
    if wanted.spot:
        arguments += ["--spot", "auto"]
    if wanted.region:
        arguments += ["--region", wanted.region]
    if usd_per_hour:
        arguments += ["--price", f"{usd_per_hour:g}"]
    return [*arguments, *(f"{key}={inline(value)}" for key, value in settings.items()), *flags]


def _joining(recipe: Recipe, run_dir: Path, url: str, engine: str, model: str) -> list[str]:
    """Return the options to join. The token is passed as a file, so that no process list shows it."""
    arguments = ["worker", "--join", url, "--token-file", str(run_dir / "worker.token"), *_trust(recipe)]
    return [*arguments, "--engine", engine, "--model", model]


def status_command(recipe: Recipe, run_dir: Path, url: str) -> str:
    return shlex.join(["polyrl", "status", "--run-dir", str(run_dir), *_reaching(recipe, url)])


def doctor_command(recipe: Recipe, run_dir: Path, url: str) -> str:
    return shlex.join(["polyrl", "doctor", str(run_dir), *_reaching(recipe, url)])


def _reaching(recipe: Recipe, url: str) -> list[str]:
    """Return the options to reach the manager: with TLS, its URL, since the directory lacks the certificate's name."""
    return [*(["--manager", url] if recipe.manager.tls_cert else []), *_trust(recipe)]


def _trust(recipe: Recipe) -> list[str]:
    return ["--ca", recipe.manager.ca] if recipe.manager.ca else []


def from_elsewhere(url: str, wanted: ManagerSection) -> str:
    """Return where other machines dial a manager; one that listens on all addresses, at one of them."""
    parts = urlsplit(url)
    if wanted.address:
        return f"{parts.scheme}://{_in_url(wanted.address)}:{parts.port}"
    try:
        listens = ip_address(parts.hostname or "")
    except ValueError:  # a name
        return url
    if not listens.is_unspecified:
        return url
    fitting = [one for one in listening_addresses(()) if ip_address(one).version == listens.version]
    return url.replace(str(listens), fitting[0], 1) if fitting else url


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def devices_of(recipe: Recipe, own: DeviceSpan) -> dict[str, str]:
    """Return the environment of a worker with devices of its own: those that come after the trainer's."""
    if choose_device(recipe.model.device) != "cuda":
        return {}
    first = recipe.train.ranks + own.first
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if visible and first + own.num > len(visible):
        raise ProviderError(
            f"CUDA_VISIBLE_DEVICES has {len(visible)} devices, and a worker needs number {first + own.num}"
        )
    names = visible or [str(number) for number in range(first + own.num)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + own.num])}


async def tell_who_is_turned_away(
    fleet: Fleet, started: Container[str], say: Callable[[str | Text], None], every_s: float = _REFRESH_EVERY_S
) -> None:
    """Print a line for each worker from elsewhere that cannot serve this run, until it is cancelled, or the manager is
    given up, which the run reports itself. `started` are told of by their keeper."""
    told: dict[str, str] = {}
    with contextlib.suppress(UserError):
        while True:
            for one in (await fleet.status()).turned_away:
                if told.get(one.name) != one.why and one.name not in started:
                    told[one.name] = one.why
                    say(Text(f"worker {one.name} is gone: {one.why}", style="yellow"))
            await asyncio.sleep(every_s)
