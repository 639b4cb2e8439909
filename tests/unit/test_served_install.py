"""Handing a version to the ranks of a server, without a server: ranks are threads, models are small."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from msgspec.structs import replace
from tests.unit.slices import Model, loader, state
from tests.weights.copies import copy_of

from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.served import installing
from polyrl.engines.served.http import ServerAnswered
from polyrl.engines.served.inside import Rank, take
from polyrl.engines.served.installing import HandedVersion, handing, new_name
from polyrl.engines.served.server import ServerBroken
from polyrl.ids import Version
from polyrl.weights.manifest import AdapterFacts
from polyrl.weights.shelf import HostCopy


def hand_over(copy: HostCopy, ranks: list[Callable[[str], None]], tmp_path: Path) -> None:
    """Play a server whose ranks are threads. Its request is answered when they have ended."""
    install(Weights(Version(copy.manifest.version), copy=copy), ranks, tmp_path)


def install(weights: Weights, ranks: list[Callable[[str], None]], tmp_path: Path) -> None:
    async def main() -> None:
        staged = await installing.stage(weights, str(tmp_path))
        name = new_name()

        async def ask() -> None:
            await asyncio.gather(*(asyncio.to_thread(one, name) for one in ranks))

        await installing.hand_over(staged, name, ask(), late_s=0.1)

    asyncio.run(main())


def ranks_of(models: list[Model], **faults) -> list[Callable[[str], None]]:
    num = len(models)
    ranks = [Rank(one, num, one, num) for one in range(num)]
    return [
        lambda name, model=model, rank=rank: take(name, rank, model, loader(model, rank, **faults))
        for model, rank in zip(models, ranks, strict=True)
    ]


@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_every_rank_gets_its_slice_and_is_compared(num_slices: int, tmp_path: Path):
    models = [Model(num_slices) for _ in range(num_slices)]
    for version in (1, 2):
        with copy_of(state(version), version) as copy:
            hand_over(copy, ranks_of(models), tmp_path)
        table = torch.cat([one.embed_tokens.weight for one in models])
        assert torch.equal(table, state(version)["embed_tokens.weight"])
        assert all(torch.equal(one.norm.weight, state(version)["norm.weight"]) for one in models)


def test_nobody_writes_when_one_rank_is_not_ready(tmp_path: Path):
    models = [Model(2), Model(2, torch.bfloat16)]
    before = models[0].embed_tokens.weight.clone()
    with copy_of(state(1), 1) as copy, pytest.raises(EngineError, match="start it with --dtype float32") as failure:
        hand_over(copy, ranks_of(models), tmp_path)
    assert not isinstance(failure.value, ServerBroken)
    assert torch.equal(models[0].embed_tokens.weight, before)


@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"norm.weight": torch.zeros(12)}, r"norm.weight has shape \[12\] in the version, \[8\] in the server"),
        ({"embed_tokens.weight": torch.zeros(64, 12)}, r"embed_tokens.weight has shape \[64, 12\]"),
        ({"embed_tokens.weight": torch.zeros(80, 8)}, r"embed_tokens.weight has shape \[80, 8\]"),
    ],
)
def test_a_version_of_another_model_is_refused_before_anything_is_written(num_slices, wrong, why, tmp_path: Path):
    models = [Model(num_slices) for _ in range(num_slices)]
    before = [one.embed_tokens.weight.clone() for one in models]
    with copy_of(state(1) | wrong, 1) as copy, pytest.raises(EngineError, match=why) as failure:
        hand_over(copy, ranks_of(models), tmp_path)
    assert not isinstance(failure.value, ServerBroken)
    assert all(torch.equal(one.embed_tokens.weight, old) for one, old in zip(models, before, strict=True))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"extra.weight": torch.zeros(1)}, "it has extra.weight"),
        ({"norm.weight": None}, "it has no norm.weight"),
        ({"norm.weight": torch.zeros(9)}, r"norm.weight has shape \[9\]; expected \[8\]"),
        ({}, ""),
    ],
)
def test_a_server_that_runs_already_must_have_the_tensors_of_our_directory(change, why, tmp_path: Path, caplog):
    theirs = {name: one for name, one in (state(1) | change).items() if one is not None}
    for folder, saved in ((tmp_path / "ours", state(2)), (tmp_path / "theirs", theirs)):
        folder.mkdir()
        (folder / "config.json").write_text('{"vocab_size": 64}')
        safetensors.torch.save_file(saved, folder / "model.safetensors")
    installing.check_served(str(tmp_path / "ours"), str(tmp_path / "ours"))
    assert not caplog.text
    with pytest.raises(EngineError, match=why) if why else contextlib.nullcontext():
        installing.check_served(str(tmp_path / "ours"), str(tmp_path / "theirs"))
    assert ("is taken for" in caplog.text) == (not why)
    installing.check_served(str(tmp_path / "ours"), "somebody/a-model")
    assert "which is no directory here" in caplog.text


@pytest.mark.parametrize("num_slices", [1, 2])
def test_a_directory_is_taken_in_the_dtype_of_the_server_and_compared(num_slices: int, tmp_path: Path, caplog):
    """A server on a CPU computes in float32, whatever its directory is in."""
    saved = {name: one.bfloat16() for name, one in state(1).items()}
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    weights, models = Weights(Version(1), folder=str(tmp_path)), [Model(num_slices) for _ in range(num_slices)]
    install(weights, ranks_of(models), tmp_path)
    assert torch.equal(torch.cat([one.embed_tokens.weight for one in models]), saved["embed_tokens.weight"].float())
    assert "nothing that could be compared" not in caplog.text
    with pytest.raises(ServerBroken, match=r"version 1: norm.weight of slice 0"):
        install(weights, ranks_of([Model(1)], wrong=True), tmp_path)
    with copy_of(saved, 2, dtype="bfloat16") as copy, pytest.raises(EngineError, match="with --dtype bfloat16"):
        hand_over(copy, ranks_of([Model(1)]), tmp_path)


def test_a_directory_that_the_server_rounds_is_installed_and_said_not_to_be_compared(tmp_path: Path, caplog):
    safetensors.torch.save_file(state(1), tmp_path / "model.safetensors")
    model = Model(1, torch.bfloat16)
    install(Weights(Version(1), folder=str(tmp_path)), ranks_of([model]), tmp_path)
    assert torch.equal(model.norm.weight, state(1)["norm.weight"].bfloat16())
    assert "nothing that could be compared" in caplog.text


def test_a_rank_that_fails_while_it_writes_leaves_a_broken_server(tmp_path: Path):
    with copy_of(state(1), 1) as copy, pytest.raises(ServerBroken, match=r"RuntimeError: no memory$"):
        hand_over(copy, ranks_of([Model(1)], fails=True), tmp_path)


def test_what_is_read_back_wrong_is_noticed(tmp_path: Path):
    with copy_of(state(1), 1) as copy, pytest.raises(ServerBroken, match=r"version 1: norm.weight of slice 0"):
        hand_over(copy, ranks_of([Model(1)], wrong=True), tmp_path)


def test_a_server_that_keeps_tensors_of_ours_is_noticed(tmp_path: Path):
    with copy_of(state(1), 1) as copy, pytest.raises(ServerBroken, match="keeps tensors"):
        hand_over(copy, ranks_of([Model(1)], keep=[]), tmp_path)


def test_a_rank_that_vanishes_while_it_writes_leaves_a_broken_server(tmp_path: Path):
    def vanish(name: str) -> None:
        def load(tensors) -> None:
            raise SystemExit  # the process is gone: so is its connection

        rank = Rank(0, 1, 0, 1)
        with pytest.raises(SystemExit):
            take(name, rank, Model(1), load)

    with copy_of(state(1), 1) as copy, pytest.raises(ServerBroken, match="does not answer"):
        hand_over(copy, [vanish], tmp_path)


def test_a_server_that_answers_with_an_error_before_it_fetches_anything_runs_on(tmp_path: Path):
    def refuse(_: str) -> None:
        raise ServerAnswered("/collective_rpc", 500, "no such method")

    with copy_of(state(1), 1) as copy, pytest.raises(EngineError, match="no such method") as failure:
        hand_over(copy, [refuse], tmp_path)
    with copy_of(state(1), 1) as copy, pytest.raises(EngineError, match="did not call"):
        hand_over(copy, [lambda _: None], tmp_path)
    assert not isinstance(failure.value, ServerBroken)


def test_a_file_that_can_be_shortened_is_not_read(tmp_path: Path):
    model, fd = Model(1), os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)

    async def main() -> None:
        name = new_name()
        async with handing(name, HandedVersion([], 1 << 20, []), fd) as offered:
            asking = asyncio.to_thread(take, name, Rank(0, 1, 0, 1), model, lambda _: None)
            await asyncio.gather(offered.answers(), asking)

    with pytest.raises(EngineError, match="can be shortened"):
        asyncio.run(main())
    os.close(fd)


def test_a_worker_that_is_gone_harms_no_server():
    take(new_name(), Rank(0, 1, 0, 1), Model(1), lambda _: pytest.fail("there is nothing to load"))


def test_ranks_hang_up_when_the_worker_does(tmp_path: Path):
    """The worker dies between the offer and its word to go: the rank goes on with what it has."""
    name, model = new_name(), Model(1)
    before = model.embed_tokens.weight.clone()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        rank = threading.Thread(target=take, args=(name, Rank(0, 1, 0, 1), model, lambda _: pytest.fail("no word")))
        rank.start()
        listener.accept()[0].close()
        rank.join(10)
    assert not rank.is_alive()
    assert torch.equal(model.embed_tokens.weight, before)


def test_an_adapter_is_refused_with_the_key_that_sends_whole_weights(tmp_path: Path):
    with copy_of(state(1), 1) as copy:
        manifest = replace(copy.manifest, adapter=AdapterFacts("ab" * 32, "float32", 2.0))
    with pytest.raises(EngineError, match=r'cannot merge; expected whole weights: lora.publish = "merged"'):
        installing.offer_of(manifest, tmp_path)


def test_what_is_read_back_are_tables_and_vectors_from_all_over_the_model():
    layers = {f"model.layers.{one}.input_layernorm.weight": torch.zeros(4) for one in range(30)}
    matrices = {"model.layers.0.mlp.up_proj.weight": torch.zeros(4, 4)}
    state = {"model.embed_tokens.weight": torch.zeros(8, 4), **layers, **matrices, "model.norm.weight": torch.zeros(4)}
    with copy_of(state, 1) as copy:
        probes = installing.probes_of(copy.manifest.layout)
    assert len(probes) == 8
    assert probes[0] == "model.embed_tokens.weight"
    assert "model.layers.0.mlp.up_proj.weight" not in probes
