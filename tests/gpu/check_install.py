"""Installing versions while samples run, on a GPU: how long the transfer takes, and how long samples stand still.

python tests/gpu/check_install.py           Qwen3-1.7B's shape, bfloat16; a full version, then deltas of 1% of elements
python tests/gpu/check_install.py device    the same, with deltas made on the GPU (weights.encode_on)

With --small: a tiny model on the device that is here. Exit code 1 where the weights are not those that were published,
or a version wrote nothing.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
import asyncio
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]  # it is run as a file

import torch  # noqa: E402
from tests.gpu.setting import ARCH, DEVICE, SMALL, need_a_gpu_or_small  # noqa: E402

from polyrl.bench.engine import Work, make_model, prompts_of  # noqa: E402
from polyrl.engines.builtin.config import BuiltinConfig  # noqa: E402
from polyrl.engines.builtin.engine import BuiltinEngine  # noqa: E402
from polyrl.engines.builtin.models import describe  # noqa: E402
from polyrl.engines.engine import Job, Weights  # noqa: E402
from polyrl.trainer.publishing import Publishing  # noqa: E402
from polyrl.weights.peer import WeightPeer  # noqa: E402
from polyrl.weights.server import WeightServer  # noqa: E402
from polyrl.weights.settings import WeightSettings  # noqa: E402
from polyrl.weights.tensors import pin_buffer  # noqa: E402
from polyrl.wire.frames import Sampling  # noqa: E402

NUM_SAMPLES, PROMPT, NEW = (4, 16, 3900) if SMALL else (64, 256, 7000)
SETTINGS = WeightSettings(interfaces=("127.0.0.0/8",))
KEY = bytes(32)


class Clock:
    """A sink that notes when the first sample's tokens came."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.versions: list[int] = []

    def tokens(self, lease, tokens, logprobs, version) -> None:
        if lease == 1:
            self.at.append(time.perf_counter())
            self.versions.append(version)

    def ended(self, lease, reason, detail="") -> None:
        pass


def move_a_little(state: dict[str, torch.Tensor]) -> None:
    """One element in a hundred, by one unit in its last place."""
    for tensor in state.values():
        bits = tensor.view(torch.int16)
        bits += (torch.rand(bits.shape, device=bits.device) < 0.01).to(torch.int16)


async def make_graphs(engine: BuiltinEngine) -> None:
    """Prompts of all sizes: a shape has a graph the second time. Whoever stages weights meanwhile takes memory of the
    GPU, and neither may disturb the other.
    """
    for lease, rows in enumerate((4, 8) if SMALL else (100, 200, 400, 900, 1900) * 2, start=1000):
        engine.generate(Job(lease, lease, [lease] * rows, [], 2, lease, Sampling(ignore_eos=True)))
        await asyncio.sleep(0.04)


async def main() -> bool:
    need_a_gpu_or_small()
    torch.manual_seed(0)
    work = Work(ARCH, None, NUM_SAMPLES, PROMPT, 64)
    trained, served = (make_model(work, DEVICE).bfloat16() for _ in range(2))
    context = 4096 if SMALL else 8192
    config = BuiltinConfig(
        model="bench", dtype="bfloat16", device=DEVICE, slots=NUM_SAMPLES + 16, block_tokens=32,
        kv_tokens=(NUM_SAMPLES + 16) * context, chunk_tokens=context, max_context=context, version=0,
        after_install="keep",
    )  # fmt: skip
    engine, clock = BuiltinEngine(config, describe(served, "bench")), Clock()
    await engine.start(clock)
    prompts = prompts_of(work, served.config.vocab_size)
    for number in range(NUM_SAMPLES):
        engine.generate(Job(number + 1, number, prompts[number], [], NEW, number, Sampling(ignore_eos=True)))
    while len(clock.at) < 20:
        await asyncio.sleep(0.01)
    server, peer = WeightServer(SETTINGS, KEY, prepare=pin_buffer), WeightPeer(SETTINGS, KEY)
    server.start()
    state = dict(trained.named_parameters())
    state = {name: one.detach() for name, one in state.items()}
    policy = SimpleNamespace(
        published=lambda: state, published_dtype="bfloat16", adapter=None, engine_writer=lambda: None
    )
    publishing = Publishing(policy, server, None, encodes="device" in sys.argv[1:])
    for version in range(1, 6):
        if version > 1:
            move_a_little(state)
        began = time.perf_counter()
        offer = await publishing.publish(version)
        published = time.perf_counter()
        await asyncio.to_thread(server.wait_for_deltas, 60.0)
        encoded = time.perf_counter()
        sent = server.num_bytes_sent
        copy = await asyncio.to_thread(peer.pull, version, offer.digest, offer.addresses, 120.0)
        pulled = time.perf_counter()
        graphs = asyncio.create_task(make_graphs(engine)) if version == 1 else None
        await engine.install(Weights(version, copy=copy))
        installed = time.perf_counter()
        if graphs is not None:
            await graphs
        assert engine.health() is None, engine.health()
        from_delta = bool(copy.base)
        copy.close()
        num = len(clock.at)
        while len(clock.at) < num + 3:
            await asyncio.sleep(0.005)
        gaps = [b - a for a, b in zip(clock.at, clock.at[1:], strict=False)]
        around = max(gaps[num - 3 : num + 2])
        usual = sorted(gaps[-60:-10])[25] if len(gaps) > 70 else sorted(gaps)[len(gaps) // 2]
        print(json.dumps({
            "version": version, "delta": from_delta, "publish_s": published - began, "encode_s": encoded - published,
            "pull_s": pulled - encoded, "mb_sent": (server.num_bytes_sent - sent) / 1e6,
            "install_s": installed - pulled, "pause_s": engine.last_install_s, "longest_gap_s": around,
            "usual_gap_s": usual, "reserved_gb": torch.cuda.memory_reserved() / 1e9,
        }), flush=True)  # fmt: skip
    same = all(torch.equal(one, dict(served.named_parameters())[name]) for name, one in state.items())
    seen = sorted(set(clock.versions))
    print(json.dumps({"equal": same, "versions_seen": seen}), flush=True)
    await engine.close()
    peer.close()
    server.close()
    return same and seen == list(range(6))


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
