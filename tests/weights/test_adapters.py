"""Adapters: the arithmetic of merging, to the bit; fingerprints; an engine that is sent adapters alone."""

import asyncio
from functools import partial

import pytest
import torch
import transformers
from tests.builtin.stage import GREEDY, answers, engine
from tests.builtin.tiny_models import save_tiny
from tests.weights.stage import stage as wire_stage

from polyrl.engines.contract import EngineContract
from polyrl.engines.engine import EngineError, Weights
from polyrl.ids import Version
from polyrl.weights import adapters
from polyrl.weights.chunks import table_of
from polyrl.weights.manifest import (
    AdapterFacts,
    BadManifest,
    Manifest,
    changes_in,
    decode_manifest,
    encode,
)
from polyrl.weights.tensors import layout_of, snapshot

SCALING = 1.7
TARGETS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def low_rank(rows, columns, rank=6, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rank, columns, generator=made), torch.randn(rows, rank, generator=made)


def merged(base, a, b):
    out = torch.empty_like(base)
    adapters.merge(base, a, b, SCALING, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_the_product_added_and_rounded_once(dtype):
    base = torch.randn(300, 700, generator=torch.Generator().manual_seed(1)).to(dtype)
    a, b = low_rank(300, 700)
    exact = base.double() + SCALING * (b.double() @ a.double())
    found = merged(base, a, b)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=2e-7 if dtype == torch.float32 else 2**-8, atol=2e-5)


def test_merging_gives_the_same_bits_however_the_rows_are_cut():
    """Every number is the same sequence of roundings, wherever it lies."""
    base, (a, b) = torch.randn(500, 333), low_rank(500, 333)
    whole = merged(base, a, b)
    by_rows = torch.cat([merged(base[row : row + 7], a, b[row : row + 7]) for row in range(0, 500, 7)])
    by_columns = torch.cat([merged(base[:, at : at + 5], a[:, at : at + 5], b) for at in range(0, 333, 5)], 1)
    assert torch.equal(whole, by_rows)
    assert torch.equal(whole, by_columns)
    one_by_one = base[3, 4].new_zeros(())
    scaled = b[3] * torch.tensor(SCALING)
    for rank in range(len(a)):
        one_by_one = one_by_one + scaled[rank] * a[rank, 4]
    assert whole[3, 4] == base[3, 4] + one_by_one


def test_a_fingerprint_is_of_every_number():
    model = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    before = adapters.fingerprint(model)
    assert adapters.fingerprint(dict(reversed(model.items()))) == before
    assert adapters.fingerprint({name: one.bfloat16() for name, one in model.items()}) != before
    model["b"][4] = torch.nextafter(model["b"][4], torch.tensor(9.0))
    assert adapters.fingerprint(model) != before


def adapter_tensors(model, seed):
    shapes = {name: tuple(model.get_submodule(name).weight.shape) for name in TARGETS}
    found = {}
    for number, (name, shape) in enumerate(shapes.items()):
        a, b = low_rank(*shape, rank=3, seed=10 * seed + number)
        found |= {f"{name}.lora_A.weight": 0.1 * a, f"{name}.lora_B.weight": 0.1 * b}
    return found


def test_a_manifest_says_what_an_adapter_is_for_and_holds_pairs_alone():
    named = {"x.lora_A.weight": torch.zeros(2, 8), "x.lora_B.weight": torch.zeros(4, 2)}
    facts = AdapterFacts("ab" * 32, "bfloat16", 2.0)

    def written(tensors):
        layout = layout_of(tensors, "float32")
        data = bytes(layout.num_bytes)
        return encode(Manifest(3, layout, table_of(data), "", adapter=facts))

    manifest = decode_manifest(written(named))
    assert manifest.adapter == facts
    assert [one.target for one in changes_in(manifest.layout)] == ["x.weight"]
    other = Manifest(3, manifest.layout, manifest.chunks, "", adapter=AdapterFacts("cd" * 32, "bfloat16", 2.0))
    assert other.digest != manifest.digest, "a version names its base"
    for wrong in (
        {"x.lora_A.weight": torch.zeros(2, 8)},
        {**named, "y.weight": torch.zeros(2)},
        {**named, "x.lora_B.weight": torch.zeros(4, 3)},
    ):
        with pytest.raises(BadManifest):
            decode_manifest(written(wrong))


async def install(stage, peer, offer):
    copy = await asyncio.to_thread(peer.pull, offer.version, offer.digest, offer.addresses, 20.0)
    try:
        await stage.engine.install(Weights(Version(offer.version), copy=copy))
    finally:
        copy.close()


async def text(stage):
    return await answers(stage, [stage.begin(prompt=[5, 6, 7, 8], sampling=GREEDY, max_tokens=24)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_makes_of_base_and_adapter_what_the_trainer_makes_of_them(tmp_path, dtype):
    """Adapters that follow each other, a whole version in between, and the merged weights on another engine."""
    folder = save_tiny("qwen3", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    parameters = dict(model.named_parameters())
    facts = AdapterFacts(adapters.fingerprint(parameters), dtype, SCALING)
    whole_layout = layout_of(parameters, dtype)
    small_layout = layout_of(adapter_tensors(model, 0), "float32")

    def sums(changes):
        found = {name: one.detach().clone() for name, one in parameters.items()}
        for name in TARGETS:
            a, b = changes[f"{name}.lora_A.weight"], changes[f"{name}.lora_B.weight"]
            adapters.merge(parameters[f"{name}.weight"], a, b, SCALING, found[f"{name}.weight"])
        return found

    async def script(server, one, other):
        contract = EngineContract()
        make = partial(engine, folder, dtype=dtype)
        built = make()
        async with contract.on_stage(built) as first, contract.on_stage(make()) as second:
            said = [await text(first)]
            for version in (1, 2, 3, 5):
                changes = adapter_tensors(model, version)
                fill = partial(snapshot, changes, small_layout)
                await install(first, one, server.publish(version, small_layout, fill, adapter=facts))
                now = dict(built._loaded.model.named_parameters())  # type: ignore[union-attr]
                assert all(torch.equal(now[name], value) for name, value in sums(changes).items())
                said.append(await text(first))
                if version == 3:  # all of another version is forgotten again
                    others = {name: value + 1 for name, value in parameters.items()}
                    offer = server.publish(4, whole_layout, partial(snapshot, others, whole_layout))
                    await install(first, one, offer)
            offer = server.publish(6, whole_layout, partial(snapshot, sums(changes), whole_layout))
            await install(second, other, offer)
            assert said[-1] == await text(second)
            assert len({str(one) for one in said}) == 5

    with wire_stage() as wires:
        asyncio.run(script(wires.server(), wires.peer(0), wires.peer(1)))


@pytest.mark.parametrize(
    ("seed", "dtype", "message"),
    [
        (1, "float32", "version 1 is an adapter for another base: .*expected the model that the run is trained from"),
        (0, "bfloat16", "version 1 is an adapter for a base in float32; .* is loaded in bfloat16"),
    ],
)
def test_an_adapter_for_another_base_is_refused_and_changes_nothing(tmp_path, seed, dtype, message):
    folder, theirs = save_tiny("qwen3", tmp_path / "a", seed=0), save_tiny("qwen3", tmp_path / "b", seed=seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    facts = AdapterFacts(adapters.fingerprint(dict(model.named_parameters())), "float32", SCALING)
    changes = adapter_tensors(model, 1)
    layout = layout_of(changes, "float32")

    async def script(server, peer):
        async with EngineContract().on_stage(engine(theirs, dtype=dtype)) as stage:
            before = await text(stage)
            offer = server.publish(1, layout, partial(snapshot, changes, layout), adapter=facts)
            with pytest.raises(EngineError, match=message):
                await install(stage, peer, offer)
            assert await text(stage) == before

    with wire_stage() as wires:
        asyncio.run(script(wires.server(), wires.peer(0)))
