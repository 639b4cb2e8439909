"""Environments of `verifiers` (v1), unmodified: its loop, tools and rewards; the host's front is its model.

    environment = "verifiers", environment_args = { taskset = { id = "my-taskset" }, agent = { max_turns = 8 } }

The arguments are verifiers' own `[env]` block. Seats without a harness play in this process (verifiers_harness.py), and
seats without a runtime run here. A trace's id is the session of its calls.

Rules kept here: `episode.ok` and each trace's `ok` say whether there is a reward, never the reward itself: an episode
that a broken connection ended has one too. A deadline of the environment's own is scored, because the policy may have
caused it, unless a call was waiting for its answer then.
Left out: verifiers' tokens and log-probabilities. The run has its own.
"""

import asyncio
import logging
from typing import Any, Literal

from msgspec import structs

from polyrl.errors import UserError, one_line
from polyrl.hosts.adapters.packages import need
from polyrl.hosts.adapters.verifiers_harness import IN_PROCESS, register
from polyrl.hosts.episode import MAX_WHY, Episode, EpisodeEnd, EpisodeFailed, checked_parts, finite
from polyrl.hosts.own import HostParts

_PACKAGE = "verifiers>=0.4,<0.5"
_SOLVED = 1.0


class VerifiersEnvironment:
    def __init__(self, parts: HostParts, client: Literal["auto", "train", "relay"] = "auto", **env: Any) -> None:
        """`client`: `train` renders with `renderers` and sends tokens, `relay` sends messages, which the front renders;
        `auto` is `train` for models that `renderers` knows."""
        self._parts = parts
        self._client = client
        self._settings = env
        self._env: Any = None
        self._context: Any = None
        self._tasks: list[Any] = []
        self._more: Any = iter(())
        self._reading = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self.name = "verifiers"
        self.num_tasks: int | None = None
        self.max_at_once: int | None = None
        self.worn_out = ""

    async def start(self) -> None:
        vf = need("verifiers.v1", _PACKAGE)
        loaders = need("verifiers.v1.utils.loaders", _PACKAGE)
        register()
        logging.getLogger("verifiers").setLevel(logging.WARNING)  # it tells every episode otherwise
        try:
            self._env = await asyncio.to_thread(self._load, loaders)
            self._context = self._model_context(vf)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"verifiers: {one_line(error)}") from error
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(ready))
        await ready

    async def close(self) -> None:
        self._stop.set()
        if self._serving is not None:
            await asyncio.wait([self._serving])

    async def play(self, episode: Episode) -> EpisodeEnd:
        task = await self._task(episode.index)
        with self._parts.front.open(episode) as opened:
            slot = self._env.slots(task)[0]
            played = await self._env.run_slot(slot, self._context, on_trace=lambda trace: opened.join(trace.id))
            opened.check()
            is_over_time = played.is_timeout or any(trace.is_timeout for trace in played.traces)
            if not played.ok and not (is_over_time and not opened.is_waiting):
                raise EpisodeFailed(f"verifiers: {_why_failed(played)}")
            return structs.replace(_end_of(played), untrained=opened.calls_but_of([one.id for one in _paid(played)]))

    # Loading

    def _load(self, loaders: Any) -> Any:
        settings = {**self._settings}
        taskset = settings.get("taskset")
        taskset = {"id": taskset} if isinstance(taskset, str) else dict(taskset or {})
        if not taskset.get("id"):
            raise UserError('verifiers: taskset.id is missing; expected a taskset\'s name, as taskset = { id = "..." }')
        settings["taskset"] = taskset
        kind = loaders.environment_class(taskset["id"], settings.get("id", ""))
        config = _config_type(loaders, kind)
        for seat in _seats(config):
            own = dict(settings.get(seat) or {})
            own.setdefault("runtime", {"type": "subprocess"})
            own.setdefault("harness", {"id": IN_PROCESS})
            settings[seat] = own
        env = loaders.load_environment(config.model_validate(settings))
        self._more = enumerate(env.taskset)
        if env.taskset.bounded:
            self._tasks = [task for _, task in self._more]
            self.num_tasks = len(self._tasks)
            if not self._tasks:
                raise UserError(f"verifiers: the taskset {taskset['id']} has no tasks")
        return env

    async def _task(self, index: int) -> Any:
        """Return a task by its number. A taskset without an end is read on as far as needed, by one episode at a time
        and in the loop: TextArena's tasks and games both seed the random numbers of the process."""
        if self.num_tasks is not None:
            return self._tasks[index % self.num_tasks]
        async with self._reading:
            while len(self._tasks) <= index:
                self._tasks.append(next(self._more)[1])
                await asyncio.sleep(0)
        return self._tasks[index]

    def _model_context(self, vf: Any) -> Any:
        front, family = self._parts.front, self._parts.family
        if self._client == "train" or (self._client == "auto" and family is not None):
            if not self._parts.folder:
                raise UserError('verifiers: client = "train" needs a model directory')
            renderer = need("renderers", "renderers").config_from_name(family.name) if family is not None else None
            client = vf.TrainClientConfig(
                base_url=f"{front.url}/v1",
                renderer=renderer,
                renderer_model_name=self._parts.folder,
                api_key_var="NONE",
            )
        else:
            client = vf.EvalClientConfig(base_url=f"{front.url}/v1", api_key_var="NONE")
        return vf.ModelContext(model=front.model, client=client)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Hold verifiers' shared resources. Entered and left in one task, as its libraries want it."""
        try:
            async with self._env.serving():
                ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(UserError(f"verifiers: {one_line(error)}"))


def _config_type(loaders: Any, kind: Any) -> Any:
    return loaders.concrete_type(kind, loaders.EnvConfig, origin=loaders.Env) or loaders.EnvConfig


def _seats(config: Any) -> list[str]:
    agent = need("verifiers.v1.configs.agent", _PACKAGE).AgentConfig
    return [name for name, field in config.model_fields.items() if isinstance(field.default, agent)]


def _why_failed(played: Any) -> str:
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    if not errors:
        return "the episode is not ok, and does not say why"
    return " ".join(f"{errors[-1].type}: {errors[-1].message}".split())[:MAX_WHY]


def _paid(played: Any) -> list[Any]:
    """Return the traces that are trained: not those of a user that is played, or a judge, nor of attempts that the
    package made again."""
    return [trace for trace in played.traces if trace.agent.trainable] or list(played.traces)


def _end_of(played: Any) -> EpisodeEnd:
    traces = _paid(played)
    if not traces:
        raise EpisodeFailed("verifiers: the episode has no trace")
    reward = sum(finite(trace.reward, "the reward") for trace in traces) / len(traces)
    parts: dict[str, float] = {}
    for trace in traces:
        for name, one in trace.rewards.items():
            if one is not None and len(parts) < 32:
                parts[name] = parts.get(name, 0.0) + finite(one.value, f"the reward {name}") / len(traces)
    return EpisodeEnd(
        reward=reward,
        correct=reward >= _SOLVED,
        parts=checked_parts(parts),
        why=str(traces[0].stop_condition or "")[:MAX_WHY],
        num_turns=int(played.num_turns),
    )
