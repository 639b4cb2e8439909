"""Hosts of a run: a check of the environments before it begins, and the processes that `[environments]` asks for.

Rules kept here: an environment's code runs in a host's process, never in the trainer's, and in the Python that the
recipe names. A host that ends, or is no longer heard of, is started again; one that ends at once again and again is
not, and a line says so.
"""

import asyncio
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import time
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from msgspec import structs
from rich.text import Text

from polyrl.client import Fleet
from polyrl.config.dump import inline
from polyrl.config.places import shown_model
from polyrl.config.recipe import HELD_OUT, DomainSection, Recipe
from polyrl.errors import EXIT_BAD_INPUT, UserError
from polyrl.run import left_behind, processes
from polyrl.run.processes import ManagerAddress
from polyrl.run.workers import from_elsewhere, recipe_and_url

log = logging.getLogger("polyrl.train")

_CHECK_TIMEOUT_S = 300.0
"""An environment's package may load a data set."""
_LOOK_EVERY_S = 0.5
_QUICK_S = 20.0
_MAX_QUICK_ENDS = 5
"""A host that ends this often within `_QUICK_S` of its start is not started again."""
_FAILED = re.compile(r"polyrl\.hosts episode \S+ failed after [\d.]+ s: (.*)")
_END_OF_LOG_BYTES = 1 << 16
_HUNG_FACTOR = 3.0
"""A host that is not heard of for so many times `host_timeout_s` hangs, and is killed."""


def check(recipe: Recipe) -> Recipe:
    """Start each environment once, and return the recipe with the number of tasks that it has. Raises UserError."""
    if not any(domain.environment for domain in recipe.data.all_domains):
        return recipe
    found = [_check_domain(recipe, domain) for domain in recipe.data.all_domains]
    data = recipe.data
    if data.domains:
        data = structs.replace(data, domains=tuple(found))
    else:
        data = structs.replace(data, num_prompts=found[0].num_prompts)
    return structs.replace(recipe, data=data)


def _check_domain(recipe: Recipe, domain: DomainSection) -> DomainSection:
    if not domain.environment:
        return domain
    num_tasks = _num_tasks(recipe, domain)
    if num_tasks is None or domain.source or (domain.num_prompts or num_tasks + 1) <= num_tasks:
        found = domain
    else:
        found = structs.replace(domain, num_prompts=num_tasks)
    if recipe.validates and HELD_OUT in domain.validation_sets.values():
        _check_held_out(recipe, found, num_tasks)
    return found


def as_validated(domain: DomainSection) -> DomainSection:
    """Return the domain with its environment as it is validated."""
    if HELD_OUT not in domain.validation_sets.values():
        return domain
    return structs.replace(
        domain, environment_args={**domain.environment_args, **domain.validation_args}, validation_args={}
    )


def _check_held_out(recipe: Recipe, domain: DomainSection, num_tasks: int | None) -> None:
    """Refuse tasks for validation that are trained on, or are not there. Raises UserError."""
    if domain.validation_args:
        num, trained = _num_tasks(recipe, as_validated(domain)), 0
    else:
        num, trained = num_tasks, domain.num_prompts or 0
    wanted = recipe.validation.num_prompts
    if num is not None and num - trained < wanted:
        are_trained = f", of which {trained} are trained on" if trained else ""
        raise UserError(
            f"validation.num_prompts: {wanted}, and the environment {domain.environment} has {num} tasks{are_trained}; "
            "expected fewer, a smaller data.num_prompts, or data.validation_args with another seed or split"
        )


def _num_tasks(recipe: Recipe, domain: DomainSection) -> int | None:
    """Start an environment, and return how many tasks it has; None: any number. Raises UserError."""
    argv = [*polyrl_of(recipe), *environment_words(recipe, domain, "check")]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_CHECK_TIMEOUT_S, env=os.environ, check=False
        )
    except FileNotFoundError as error:
        raise UserError(f"environments.python: {argv[0]} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"environment {domain.environment}: it was not ready within {_CHECK_TIMEOUT_S:.0f} s"
        ) from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(f"environment {domain.environment}: {said[-1] if said else f'exit code {done.returncode}'}")
    try:
        return json.loads(done.stdout.splitlines()[-1])["num_tasks"]
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"environment {domain.environment}: expected an account of it, got {done.stdout!r}") from error


def polyrl_of(recipe: Recipe) -> list[str]:
    """Return the beginning of a command in the Python of the recipe's environments."""
    place = recipe.environments.python
    if not place:
        return [sys.executable, "-m", "polyrl"]
    inside = Path(place) / "bin" / "python"
    return [str(inside if inside.exists() else place), "-m", "polyrl"]


def environment_words(recipe: Recipe, domain: DomainSection, verb: str) -> list[str]:
    """Return the arguments that name an environment and its settings."""
    modules = ["--modules", recipe.modules] if recipe.modules else []
    settings = [f"{key}={inline(value)}" for key, value in domain.environment_args.items()]
    chat = [one for key, value in domain.chat_template_kwargs.items() for one in ("--chat", f"{key}={inline(value)}")]
    return ["env", verb, domain.environment, "--model", recipe.model.path, *modules, *chat, *settings]


def arguments(recipe: Recipe, domain: DomainSection, run_dir: Path, url: str, name: str) -> list[str]:
    """Return the arguments of `polyrl` for a host of this run. Without a name it chooses its own."""
    wanted = recipe.environments
    trust = ["--ca", recipe.manager.ca] if recipe.manager.ca else []
    price = ["--price", f"{wanted.price_usd_per_hour:g}"] if wanted.price_usd_per_hour else []
    return [
        *environment_words(recipe, domain, "play"),
        *("--join", url, "--token-file", str(run_dir / "host.token"), *trust),
        *(("--name", name) if name else ()),
        *("--as", recipe.environment_of(domain), "--slots", str(wanted.slots), *price),
    ]


def join_commands(recipe: Recipe, run_dir: Path, url: str) -> list[str]:
    """Return the commands that start another host of this run, one for each domain with an environment."""
    shown = structs.replace(recipe, model=structs.replace(recipe.model, path=shown_model(recipe.model.path)))
    return [
        shlex.join(["polyrl", *arguments(shown, domain, run_dir, from_elsewhere(url, recipe.manager), "")])
        for domain in recipe.data.all_domains
        if domain.environment
    ]


def join_commands_of(run_dir: Path) -> list[str]:
    """Return the commands that start another host of a run; none if it is not known here, or has no environment."""
    found = recipe_and_url(run_dir)
    return [] if found is None else join_commands(found[0], run_dir, found[1])


def last_failure(run_dir: Path) -> str:
    """Return why an episode failed last, by the logs of the run's own hosts; empty if none says so."""
    found: list[str] = []
    for file in sorted((run_dir / "logs").glob("host-*.log")):
        with file.open("rb") as lines:
            lines.seek(max(0, file.stat().st_size - _END_OF_LOG_BYTES))
            found += _FAILED.findall(lines.read().decode(errors="replace"))
    return found[-1] if found else ""


def told_failure(run_dir: Path) -> str:
    """Return the beginning of a message about it; empty if there is none."""
    found = last_failure(run_dir)
    return f"episodes failed, the last one: {found}" if found else ""


async def tell_of_failures(
    fleet: Fleet, run_dir: Path, say: Callable[[str | Text], None], every_s: float = _LOOK_EVERY_S
) -> None:
    """Print a line when an episode has failed, and at ten, a hundred and so on, until cancelled or the manager is given
    up, which the run says itself."""
    told = 0
    with suppress(UserError):
        while True:
            ended = (await fleet.status()).ledger.get("episodes_ended", {})
            num = ended.get("failed", 0)
            if num and (not told or len(str(num)) > len(str(told))):
                told, why = num, last_failure(run_dir)
                what = f"{num} episode{'s have' if num > 1 else ' has'} failed so far, through no fault of the policy"
                say(Text(f"{what}{f'; the last: {why}' if why else ''}", style="yellow"))
            await asyncio.sleep(every_s)


class HostProcess:
    """One host, started again when it ends or hangs."""

    def __init__(
        self, name: str, command: list[str], log_file: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._command, self._log_file, self._clock = command, log_file, clock
        self._mark = uuid.uuid4().hex
        self.process: Process | None = None
        self.is_given_up = False
        self.has_joined = False
        """Since its last start. Until then its environment may be getting ready, which takes as long as it takes."""
        self._started_at = self._heard_at = 0.0
        self._num_quick = 0

    async def start(self) -> None:
        self._started_at = self._heard_at = self._clock()
        self.has_joined = False
        with self._log_file.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, left_behind.MARK: self._mark},
                start_new_session=True, preexec_fn=processes.terminate_with_parent,
            )  # fmt: skip

    @property
    def age_s(self) -> float:
        return self._clock() - self._started_at

    @property
    def silent_s(self) -> float:
        return self._clock() - self._heard_at

    def note(self, there: Container[str] | None) -> None:
        """Take note of the hosts that are connected; None: the manager is away, which is no fault of a host."""
        is_there = there is not None and self.name in there
        self.has_joined |= is_there
        if is_there or there is None:
            self._heard_at = self._clock()

    async def look(self, say: Callable[[str | Text], None]) -> None:
        """Start it again if it has ended."""
        if self.process is None or self.process.returncode is None or self.is_given_up:
            return
        code, how = self.process.returncode, processes.show_end(self.process.returncode, self._log_file)
        self.end_left_behind()
        self._num_quick = self._num_quick + 1 if self.age_s < _QUICK_S else 0
        self.is_given_up = code == EXIT_BAD_INPUT or self._num_quick >= _MAX_QUICK_ENDS
        what = "it is not started again" if self.is_given_up else "it is started again, and its episodes go on"
        say(Text(f"{self.name} {how}; {what}", style="yellow"))
        if not self.is_given_up:
            await asyncio.sleep(min(5.0, 0.2 * 2**self._num_quick))
            await self.start()

    def end_left_behind(self) -> None:
        """End the processes that it had started, as servers of tools: a host that was killed leaves them behind."""
        left_behind.end(self._mark)

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()


@asynccontextmanager
async def started(recipe: Recipe, run_dir: Path, address: ManagerAddress) -> AsyncIterator[dict[str, HostProcess]]:
    """Run the hosts that `[environments]` asks for."""
    hosts: dict[str, HostProcess] = {}
    try:
        domains = recipe.data.all_domains
        for place, domain in enumerate(domains):
            for number in range(recipe.environments.processes) if domain.environment else ():
                name = f"host-{number}" if len(domains) == 1 else f"host-{place}-{number}"
                command = [*polyrl_of(recipe), *arguments(recipe, domain, run_dir, address.url, name)]
                hosts[name] = HostProcess(name, command, run_dir / "logs" / f"{name}.log")
                await hosts[name].start()
        yield hosts
    finally:
        running = [one.process for one in hosts.values() if one.process is not None]
        await asyncio.gather(*(processes.stop(one, timeout_s=5.0) for one in running))
        for host in hosts.values():
            host.end_left_behind()


async def keep(recipe: Recipe, fleet: Fleet, hosts: dict[str, HostProcess], say: Callable[[str | Text], None]) -> None:
    """Keep the hosts alive, until cancelled."""
    await keep_alive(recipe, lambda: _connected(fleet), hosts, say)


async def keep_alive(
    recipe: Recipe,
    connected: Callable[[], Awaitable[set[str] | None]],
    hosts: dict[str, HostProcess],
    say: Callable[[str | Text], None],
) -> None:
    """Start those again that have ended, and kill those that hang. `connected` names the hosts that are heard of."""
    while hosts:
        for host in hosts.values():
            await host.look(say)
        there = await connected()
        for host in hosts.values():
            host.note(there)
            if host.silent_s > _patience_s(recipe, host) and not host.is_given_up:
                log.warning("%s is not heard of; it is killed", host.name)
                host.kill()
        await asyncio.sleep(_LOOK_EVERY_S)


async def _connected(fleet: Fleet) -> set[str] | None:
    """Return the hosts that are connected; None while the manager is away."""
    try:
        return {one.name for one in (await fleet.status()).hosts if one.connected}
    except UserError:
        return None


def _patience_s(recipe: Recipe, host: HostProcess) -> float:
    """Return the silence from which a host hangs."""
    if not host.has_joined:
        return _CHECK_TIMEOUT_S
    return max(_HUNG_FACTOR * recipe.environments.host_timeout_s, _QUICK_S)
