"""An engine that was fed twenty deltas over the wire writes the tokens of one that was fed the last version in full."""

import asyncio
from functools import partial

import torch
import transformers
from tests.builtin.stage import GREEDY, answers, engine
from tests.builtin.tiny_models import save_tiny
from tests.weights.stage import stage as wire_stage

from polyrl.engines.contract import ON, EngineContract
from polyrl.engines.engine import Weights
from polyrl.ids import Version
from polyrl.weights.tensors import layout_of, snapshot

NUM_STEPS = 20
PATIENCE_S = 20.0


def train(model, optimizer, seed):
    """One step on random text, large enough to change what the model says."""
    tokens = torch.randint(3, 512, (2, 16), generator=torch.Generator().manual_seed(seed))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


async def install(stage, peer, offer):
    """The digest of the version that its deltas started from; empty when it came in full."""
    copy = await asyncio.to_thread(peer.pull, offer.version, offer.digest, offer.addresses, PATIENCE_S)
    try:
        await stage.engine.install(Weights(Version(offer.version), copy=copy))
        return copy.base
    finally:
        copy.close()


async def texts(stage):
    """Greedy and drawn answers to two prompts."""
    jobs = [(GREEDY, 1), (ON, 2), (ON, 3)]
    prompts = [[5, 6, 7, 8], [17, 301, 42, 9, 77]]
    leases = [
        stage.begin(prompt=prompt, sampling=sampling, seed=seed, max_tokens=24)
        for prompt in prompts
        for sampling, seed in jobs
    ]
    return await answers(stage, leases)


def test_twenty_deltas_and_the_full_version_give_the_same_tokens(tmp_path):
    folder = save_tiny("qwen3", tmp_path / "model")
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    layout = layout_of(trained.state_dict(), architecture="Qwen3ForCausalLM")

    async def script(server, by_deltas, in_full):
        contract = EngineContract()
        make = partial(engine, folder, dtype="bfloat16")
        async with contract.on_stage(make()) as first, contract.on_stage(make()) as second:
            before = await texts(first)
            offer = server.publish(1, layout, partial(snapshot, trained.state_dict(), layout))
            assert await install(first, by_deltas, offer) == ""
            for step in range(NUM_STEPS):
                train(trained, optimizer, step)
                base = offer.digest
                offer = server.publish(step + 2, layout, partial(snapshot, trained.state_dict(), layout))
                assert server.wait_for_deltas(PATIENCE_S)
                assert await install(first, by_deltas, offer) == base
            assert await install(second, in_full, offer) == ""
            after = await texts(first)
            assert after == await texts(second)
            assert after != before

    with wire_stage() as wires:
        asyncio.run(script(wires.server(), wires.peer(0), wires.peer(1)))
