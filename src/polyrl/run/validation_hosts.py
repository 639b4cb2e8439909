"""Hosts for validation: one for each domain whose episodes are validated, beside those that play what is trained."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from msgspec import structs
from rich.text import Text

from polyrl.config.recipe import DomainSection, Recipe
from polyrl.run import hosts, processes
from polyrl.run.hosts import HostProcess
from polyrl.run.settings import sampling_of
from polyrl.run.supervising import meanwhile
from polyrl.run.task_contract import Answered
from polyrl.run.validation_desk import EpisodeLimits, HeldOutTask, ValidationDesk
from polyrl.scheduling.rules.order import mix64
from polyrl.trainer.local_engine import LocalAnswer, LocalEngine, LocalPrompt
from polyrl.wire.control import AnswerRules
from polyrl.wire.credentials import TOKEN_FILES
from polyrl.wire.host_frames import MakeCall

_WORLDS = 0x76616C6964
"""Keeps the seeds of tasks that are validated apart from those of training."""


@asynccontextmanager
async def started(
    recipe: Recipe,
    run_dir: Path,
    engine: LocalEngine | None,
    answers: AnswerRules,
    say: Callable[[str | Text], None],
) -> AsyncIterator[Mapping[str, ValidationDesk]]:
    """Start the hosts, and keep them alive. Returns the desk at which each validation set is played."""
    desks: dict[str, ValidationDesk] = {}
    played: dict[str, tuple[HostProcess, ValidationDesk]] = {}
    async with AsyncExitStack() as stack:
        for domain in recipe.data.all_domains if engine is not None and recipe.validates else ():
            if engine is None or not domain.environment or not domain.validation_sets:
                continue
            name = f"validation-{len(played)}"
            desk = _desk(recipe, run_dir, engine, answers, name)
            stack.push_async_callback(desk.close)
            await desk.start()
            host = HostProcess(name, _command(recipe, domain, run_dir, desk), run_dir / "logs" / f"{name}.log")
            stack.push_async_callback(_stop, host)
            await host.start()
            played[name] = host, desk
            desks |= dict.fromkeys(domain.validation_sets, desk)

        async def heard() -> set[str]:
            return {name for name, (_, desk) in played.items() if desk.is_heard}

        processes_ = {name: host for name, (host, _) in played.items()}
        await stack.enter_async_context(meanwhile(hosts.keep_alive(recipe, heard, processes_, say)))
        yield desks


async def attempt_episodes(
    recipe: Recipe, desk: ValidationDesk, tasks: Sequence[tuple[int, bytes]]
) -> list[list[Answered | None]]:
    """Return every task's episodes; None where there is none. A task is its number and its row."""
    num, seed = recipe.validation.samples_per_prompt, recipe.train.seed
    episodes = [
        HeldOutTask(index, mix64(seed, _WORLDS, index) >> 1, mix64(seed, _WORLDS, index, attempt), row)
        for index, row in tasks
        for attempt in range(num)
    ]
    played = await desk.play(episodes)
    return [played[at : at + num] for at in range(0, len(played), num)]


def _desk(recipe: Recipe, run_dir: Path, engine: LocalEngine, answers: AnswerRules, name: str) -> ValidationDesk:
    token = (run_dir / TOKEN_FILES["host"]).read_text().strip()
    wanted = recipe.environments
    limits = EpisodeLimits(wanted.rules, answers, recipe.rollout.max_new_tokens, wanted.slots)
    return ValidationDesk(name, token, limits, _answerer(recipe, engine))


def _answerer(
    recipe: Recipe, engine: LocalEngine
) -> Callable[[Sequence[int], int, MakeCall, int], Awaitable[LocalAnswer]]:
    wanted, own = recipe.validation, sampling_of(recipe)
    temperature = recipe.rollout.temperature if wanted.temperature is None else wanted.temperature
    sampling = structs.replace(own, temperature=temperature, imposed=None)

    async def answer(prompt: Sequence[int], max_tokens: int, call: MakeCall, seed: int) -> LocalAnswer:
        stops = structs.replace(
            sampling, stop_ids=(*sampling.stop_ids, *call.stop_ids), stop=(*sampling.stop, *call.stop)
        )
        (one,) = await engine.answer([LocalPrompt(list(prompt), max_tokens, seed, stops)])
        return one

    return answer


def _command(recipe: Recipe, domain: DomainSection, run_dir: Path, desk: ValidationDesk) -> list[str]:
    return [
        *hosts.polyrl_of(recipe),
        *hosts.environment_words(recipe, hosts.as_validated(domain), "play"),
        *("--join", desk.url, "--token-file", str(run_dir / TOKEN_FILES["host"])),
        *("--name", desk.name, "--as", recipe.environment_of(domain), "--slots", str(recipe.environments.slots)),
    ]


async def _stop(host: HostProcess) -> None:
    if host.process is not None:
        await processes.stop(host.process, timeout_s=5.0)
    host.end_left_behind()
