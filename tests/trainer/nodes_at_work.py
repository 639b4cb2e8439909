"""What ranks on two nodes do for test_nodes_publish: `python -m tests.trainer.nodes_at_work FOLDER PORT CASES`.

Every case publishes two versions, of which each node serves its share, and then the same ones from rank zero alone.
Rank zero pulls both as a worker does, and leaves what came of it in FOLDER.
"""

import asyncio
import contextlib
import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from tests.processes import fork_each
from tests.trainer.ranks_at_work import LORA, Learner, make_crew, samples, two_steps
from tests.weights.stage import KEY, SETTINGS

from polyrl.config.recipe import AlgorithmConfig
from polyrl.config.recipe_files import load_recipe
from polyrl.run.replica import ReplicaProcess
from polyrl.trainer.devices import Devices
from polyrl.trainer.leading import Leader, follow
from polyrl.trainer.publishing import NodeShare, Publishing
from polyrl.trainer.ranks import RankInfo, Ranks
from polyrl.trainer.replicas import FarReplica, Replicas
from polyrl.weights.peer import WeightPeer
from polyrl.weights.server import WeightServer

NUM_RANKS, NUM_NODES = 4, 2
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "bfloat16"},
    "lora": {"lora": LORA},
    "adapter": {"lora": replace(LORA, publish="adapter")},
    "experts in files": {"family": "qwen3_moe", "in_files": True},
}
CASES = {
    "first": [(1, "plain"), (1, "adapter"), (2, "lora"), (4, "plain")],
    "others": [(1, "lora"), (1, "experts in files"), (2, "plain"), (4, "adapter")],
}
"""The number of replicas, and the shape of the model."""


def main(folder: Path, port: str, which: str, rank: int) -> None:
    torch.set_num_threads(1)
    node, local = divmod(rank, NUM_RANKS // NUM_NODES)
    ranks = Ranks.join(RankInfo(rank, NUM_RANKS, f"tcp://127.0.0.1:{port}", local, 2, node, NUM_NODES))
    for num_replicas, name in CASES[which]:
        ranks.use("cpu", num_replicas)
        shape = SHAPES[name]
        sharing = None if ranks.replica.size == 1 else ranks.replica
        learner = make_crew(folder, sharing, AlgorithmConfig(), shape)
        with ExitStack() as stack:
            if rank == 0:
                found = asyncio.run(lead(stack, ranks, learner, folder, shape))
                (folder / f"{num_replicas} of {name}.json").write_text(json.dumps(found))
            else:
                obey(stack, ranks, learner, shape)
    ranks.close()


def obey(stack: ExitStack, ranks: Ranks, learner: Learner, shape: dict[str, Any]) -> None:
    share = None
    if ranks.heads is not None:
        heads = ranks.heads

        def start(key: bytes) -> WeightServer:
            server = WeightServer(SETTINGS, key, nodes=heads)
            server.start()
            return server

        share = NodeShare(learner.policy, start, as_in_files="in_files" in shape)
        stack.enter_context(contextlib.closing(share))
    if ranks.replica_number > 0 and ranks.replica.rank == 0:
        recipe = load_recipe("arithmetic", ["model.path=elsewhere"])
        asyncio.run(ReplicaProcess(recipe, ranks, learner, share).run())
    else:
        follow(ranks.replica, learner, share=share)


async def lead(
    stack: ExitStack, ranks: Ranks, learner: Learner, folder: Path, shape: dict[str, Any]
) -> list[dict[str, Any]]:
    leader = None if ranks.replica.size == 1 else Leader(ranks.replica, learner, lambda _: None)
    serving = {rank // ranks.replica.size for rank in ranks.first_ranks()}
    far = [FarReplica(lines, str(at), lambda _: None, serves=at in serving) for at, lines in ranks.lines.items()]
    steps = learner.steps if leader is None else leader
    replicas = Replicas(steps, stack.enter_context(contextlib.closing(Devices())), far)
    gather = None if leader is None else leader.weights
    servers = [WeightServer(SETTINGS, KEY, nodes=ranks.heads), WeightServer(SETTINGS, KEY)]
    peers = [WeightPeer(SETTINGS, KEY, number=number) for number in range(2)]
    for one in (*peers, *servers):
        stack.callback(one.close)
    for one in servers:
        one.start()
    in_files = "in_files" in shape
    publishers = [
        Publishing(
            learner.policy, servers[0], None, {}, gather, as_in_files=in_files, key=KEY, tell=replicas.serve_shares
        ),
        Publishing(learner.policy, servers[1], None, {}, gather, as_in_files=in_files),
    ]
    told: list[dict[str, Any]] = []
    for version in (1, 2):
        if version == 2 and not far:
            await asyncio.to_thread(two_steps, steps, samples(folder, shape))
        offers = [await one.publish(version) for one in publishers]
        assert await asyncio.to_thread(servers[0].wait_for_deltas, 20)
        pulled: list[bytes] = []
        for peer, offer in zip(peers, offers, strict=True):
            with await asyncio.to_thread(peer.pull, version, offer.digest, offer.addresses, 30.0) as copy:
                pulled.append(bytes(copy.view))
        told.append(
            {
                "digests": [one.digest for one in offers],
                "num_bytes": offers[0].num_bytes,
                "num_addresses": len(offers[0].addresses),
                "same": pulled[0] == pulled[1],
                "sent": [one.num_bytes_sent for one in servers],
                "kinds": [entry.kind for entry in servers[0]._store.entries()],
            }
        )
    await replicas.stop(20)
    if leader is not None:
        leader.stop()
    return told


if __name__ == "__main__":
    fork_each(NUM_RANKS, partial(main, Path(sys.argv[1]), *sys.argv[2:]))
