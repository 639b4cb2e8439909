"""Look a machine over before a run: what is there, what is missing, what to do; with a recipe, whether it fits.

Rules kept here: nothing of a run is started or written. Every check says what it saw, and a check that fails by itself
is a finding like others. A thing that a run can do without is `missing`; a thing that stops a run is `wrong`.
"""

import asyncio
import importlib.metadata
import importlib.util
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import psutil

from polyrl import __version__
from polyrl.config.recipe import Recipe
from polyrl.cores import num_cores
from polyrl.engines import registry
from polyrl.engines.served.server import ServerKind
from polyrl.errors import PolyrlError
from polyrl.wire.control import DEFAULT_PORT

if TYPE_CHECKING:
    from polyrl.run.plan import ModelEstimates

_GIB = 1 << 30
_FEW_FILES = 4_096
_LITTLE_DISK = 5 * _GIB
_LITTLE_SHARED = 128 << 20
_FIRST_SECOND = 1_750_000_000.0
"""A clock before this moment, in 2025, was never set."""
_CLOCK_SLACK_S = 86_400.0
_FILLED = 0.9
_GB = 1_000_000_000
_EXTRAS = {
    "train": ("torch", "transformers", "safetensors", "math_verify", "peft"),
    "data": ("pyarrow",),
    "serve": ("jinja2", "tokenizers"),
    "plot": ("matplotlib",),
}


class MachineCheck(NamedTuple):
    name: str
    verdict: Literal["ok", "missing", "wrong"]
    what: str
    do: str = ""
    """The action that a person could take."""


def check_machine(folder: Path) -> list[MachineCheck]:
    """Look everything over. `folder` is where a run would be."""
    checks: Sequence[Callable[[], MachineCheck | Iterator[MachineCheck]]] = (
        _python, _processor, _devices, partial(_disk, folder), _shared_memory, _files, _port, _clock, _extras, _sandbox,
        _engines,
    )  # fmt: skip
    found: list[MachineCheck] = []
    for check in checks:
        try:
            seen = check()
            found += [seen] if isinstance(seen, MachineCheck) else list(seen)
        except Exception as error:  # noqa: BLE001  a check that fails is a finding, and the others go on
            found.append(MachineCheck(_name_of(check), "wrong", str(error)))
    return found


def _name_of(check: Callable[[], object]) -> str:
    function = check.func if isinstance(check, partial) else check
    return function.__name__.strip("_").replace("_", " ")


def check_recipe(recipe: Recipe, run_dir: Path) -> list[MachineCheck]:
    """Make the checks of a dry run, and hold memory, disk and port that the run needs against what is there."""
    from polyrl.run.plan import fit, read_shape, show_plan

    try:
        recipe = fit(recipe)
        show_plan(recipe, run_dir)
    except PolyrlError as error:
        return [MachineCheck("recipe", "wrong", str(error))]
    shape = read_shape(recipe.model.path)
    found = [MachineCheck("recipe", "ok", "its model, data, rewards and settings can be used")]
    found += [_memory(recipe, shape), _room_on_disk(recipe, shape, run_dir)]
    return [*found, _port(recipe.manager.port)] if recipe.manager.port else found


def _memory(recipe: Recipe, shape: "ModelEstimates") -> MachineCheck:
    """Training and generating take turns on a device, but the weights and the optimizer stay."""
    from polyrl.engines.builtin.config import BuiltinConfig
    from polyrl.run.plan import cache_bytes, estimate_memory

    plan = estimate_memory(recipe, shape)
    parts = {
        "model": plan.weights + plan.changes + plan.sums + plan.reference + plan.critic,
        "optimizer": plan.masters + plan.moments + plan.gradients,
        f"packs of {recipe.train.micro_batch_tokens:,} tokens": plan.activations,
        "deltas": plan.deltas,
    }
    needed = plan.total
    if recipe.train.local_generation:  # the KV cache is there when packs are not
        kv = cache_bytes(recipe, shape) * BuiltinConfig(model=recipe.model.path).kv_tokens
        parts["KV cache"] = kv
        needed += max(0, kv - plan.activations)
    there, where = _memory_of(recipe.model.device)
    told = ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
    what = f"about {_size(needed)} are needed (an estimate: {told}); {where} has {_size(there)}"
    if needed > _FILLED * there:
        do = "lower train.micro_batch_tokens, set optimizer.offload, use LoRA ([lora]), or more train.ranks"
        return MachineCheck("memory", "wrong", what, do)
    return MachineCheck("memory", "ok", what)


def _room_on_disk(recipe: Recipe, shape: "ModelEstimates", run_dir: Path) -> MachineCheck:
    from polyrl.run.plan import snapshot_bytes

    wanted = recipe.checkpoint
    saved = snapshot_bytes(recipe, shape) * (wanted.keep_last + 1) if wanted.enabled else 0
    needed = saved + int(recipe.track.samples_gb * _GB)
    free = shutil.disk_usage(_there(run_dir)).free
    kept = f"{_size(saved)} for checkpoints ({wanted.keep_last} are kept, and one is written)"
    what = f"{kept}, {recipe.track.samples_gb:g} GB of samples; {_size(free)} are free at {run_dir}"
    if needed > free:
        do = "lower checkpoint.keep_last or track.samples_gb, or name another place with --run-dir"
        return MachineCheck("room on disk", "wrong", what, do)
    return MachineCheck("room on disk", "ok", what)


def _memory_of(device: str) -> tuple[int, str]:
    from polyrl.engines.builtin.config import choose_device
    from polyrl.run.models import gpu_bytes

    if choose_device(device) == "cuda":
        return gpu_bytes(), "the GPU"
    return psutil.virtual_memory().available, "this machine"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


# The checks


def _python() -> MachineCheck:
    return MachineCheck("python", "ok", f"PolyRL {__version__}, Python {platform.python_version()}, {sys.executable}")


def _processor() -> MachineCheck:
    memory = psutil.virtual_memory()
    what = f"{num_cores()} cores, {_size(memory.total)} of memory, {_size(memory.available)} of it free"
    return MachineCheck("processor", "ok", what)


def _devices() -> MachineCheck:
    if importlib.util.find_spec("torch") is None:
        do = "pip install 'polyrl[train]'"
        return MachineCheck("devices", "missing", "torch is not installed: nothing can be trained here", do)
    from polyrl.run.models import gpus

    named = ", ".join(f"{name} with {_size(num_bytes)}" for name, num_bytes in gpus())
    return MachineCheck("devices", "ok", f"{_version('torch')}, {named or 'no GPU: runs use the CPU'}")


def _there(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    return next(one for one in (folder.resolve(), *folder.resolve().parents) if one.exists())


def _disk(folder: Path) -> MachineCheck:
    there = _there(folder)
    free = shutil.disk_usage(there).free
    what = f"{_size(free)} free at {there}"
    if free < _LITTLE_DISK:
        return MachineCheck("disk", "wrong", what, f"expected {_size(_LITTLE_DISK)}: name another place with --run-dir")
    return MachineCheck("disk", "ok", what)


def _shared_memory() -> MachineCheck:
    place = Path("/dev/shm")
    if not place.is_dir():
        return MachineCheck("shared memory", "missing", "there is no /dev/shm", "several ranks need one")
    size = shutil.disk_usage(place).total
    if size < _LITTLE_SHARED:
        do = "a container gets more with --shm-size=8g; several ranks need it"
        return MachineCheck("shared memory", "wrong", f"/dev/shm has {size >> 20} MiB", do)
    return MachineCheck("shared memory", "ok", f"/dev/shm has {_size(size)}")


def _files() -> MachineCheck:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    what = "any number of open files" if most == resource.RLIM_INFINITY else f"{most:,} open files at most"
    if most != resource.RLIM_INFINITY and most < _FEW_FILES:
        return MachineCheck("open files", "wrong", what, f"ulimit -Hn {16 * _FEW_FILES}: each worker takes several")
    return MachineCheck("open files", "ok", what)


def _port(wanted: int | None = None) -> MachineCheck:
    """Check the port. `wanted`: the one that a recipe names; None: the one that is tried first."""
    port = DEFAULT_PORT if wanted is None else wanted
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            what = f"port {port} is taken ({error.strerror})"
            if wanted is None:
                do = "a fixed one is manager.port in the recipe"
                return MachineCheck("port", "missing", f"{what}: a run takes any other that is free", do)
            return MachineCheck("port", "wrong", f"manager.port: {what}", "name another one; 0 is any that is free")
    return MachineCheck("port", "ok", f"{port} is free")


def _clock() -> MachineCheck:
    now = time.time()
    told = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    newest = Path(__file__).stat().st_mtime
    if now < max(_FIRST_SECOND, newest - _CLOCK_SLACK_S):
        why = "" if now < _FIRST_SECOND else ", which is before PolyRL was installed"
        return MachineCheck("clock", "wrong", f"it says {told}{why}", "set it: certificates and logs depend on it")
    return MachineCheck("clock", "ok", told)


def _extras() -> Iterator[MachineCheck]:
    for extra, modules in _EXTRAS.items():
        missing = [one for one in modules if importlib.util.find_spec(one) is None]
        if missing:
            do = f"pip install 'polyrl[{extra}]'"
            yield MachineCheck(f"extra {extra}", "missing", f"{', '.join(missing)} not installed", do)
        else:
            yield MachineCheck(f"extra {extra}", "ok", ", ".join(map(_version, modules)))


def _version(module: str) -> str:
    try:
        return f"{module} {importlib.metadata.version(module.replace('_', '-'))}"
    except importlib.metadata.PackageNotFoundError:
        return module


def _sandbox() -> MachineCheck:
    """Run a program in the sandbox: that bubblewrap is installed does not say that the kernel lets it work."""
    from polyrl.rewards.sandbox.program import InputCase, Program
    from polyrl.rewards.sandbox.sandbox import Sandbox

    async def play() -> str:
        async with Sandbox.open(size=1) as sandbox:
            return (await sandbox.run(Program(source="print(6 * 7)", cases=(InputCase(output="42"),)))).outcome

    try:
        outcome = asyncio.run(play())
    except PolyrlError as error:
        return MachineCheck("sandbox", "missing", str(error), "only code rewards need it")
    if outcome != "passed":
        return MachineCheck(
            "sandbox", "wrong", f"a program that is right was judged {outcome}", "see docs/concepts/sandbox.md"
        )
    return MachineCheck("sandbox", "ok", "a program ran in it, and was judged right")


def _engines() -> Iterator[MachineCheck]:
    kinds: tuple[ServerKind, ...] = ("vllm", "sglang")
    for kind in kinds:
        try:
            yield MachineCheck(f"engine {kind}", "ok", registry.python_for(kind))
        except PolyrlError:
            what = "not installed; the builtin engine needs no server"
            yield MachineCheck(f"engine {kind}", "missing", what, "docs/guides/engines.md")
