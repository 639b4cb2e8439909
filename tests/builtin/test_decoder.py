"""The decoder that is written out for the CPU: which models it takes, and that it says what their modules say."""

import math
import threading
from typing import NamedTuple

import pytest
import torch
from tests.builtin.tiny_models import FAMILIES, save_tiny

from polyrl.engines.builtin import models, sampling
from polyrl.engines.builtin.batching import Batching, Chunk, Member
from polyrl.engines.builtin.decoder import Decoder, Matrix, can_pack
from polyrl.engines.builtin.kv_cache import KvCache
from polyrl.engines.builtin.runner import Runner
from polyrl.engines.builtin.steps import Drawn, DrawRule
from polyrl.ids import LeaseId
from polyrl.wire.frames import Sampling

PLAIN = {"llama", "mistral", "qwen2", "qwen3"}
ON = Sampling(ignore_eos=True)

pytestmark = pytest.mark.skipif(not can_pack(), reason="no oneDNN here: plain decoders run through their modules")


def load(family, folder, **changes) -> models.Loaded:
    return models.load(str(save_tiny(family, folder, **changes)), "float32", "cpu")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_plain_decoders_are_written_out_and_others_run_through_their_modules(family, tmp_path):
    assert (Decoder.find(load(family, tmp_path).model) is not None) == (family in PLAIN)


def test_a_model_with_an_adapter_runs_through_its_modules(tmp_path):
    class Adapter(torch.nn.Linear):
        pass

    model = load("llama", tmp_path).model
    model.model.layers[1].mlp.up_proj.__class__ = Adapter
    assert Decoder.find(model) is None


def test_other_types_and_turns_that_depend_on_the_length_run_through_their_modules(tmp_path):
    assert Decoder.find(load("llama", tmp_path / "half").model.to(torch.bfloat16)) is None
    turns = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    assert Decoder.find(load("llama", tmp_path / "dynamic", rope_parameters=turns).model) is None


class Desk:
    """A runner and its batch, step by step."""

    def __init__(self, loaded: models.Loaded) -> None:
        self.batching = Batching(KvCache(200, 4), 64, 512)
        self.runner = Runner(loaded, 200, 4)

    def add(self, number: int, num_tokens: int) -> Member:
        member = Member(LeaseId(number), [3 + (number * 31 + at) % 500 for at in range(num_tokens)], 500)
        self.batching.add(member)
        return member

    def step(self) -> Drawn:
        chunks = self.batching.plan()
        drawn = self.runner.run(chunks, self.wanted(chunks))
        self.take_in(chunks, [drawn])
        return drawn

    def run(self, num_tokens: int) -> list[Drawn]:
        self.add(0, num_tokens)
        return [self.step() for _ in range(4)]

    def wanted(self, chunks: list[Chunk]) -> list[DrawRule]:
        return [DrawRule(ON, int(one.member.lease), len(one.member.tokens)) for one in chunks if one.samples]

    def take_in(self, chunks: list[Chunk], drawn: list[Drawn]) -> None:
        self.batching.computed(chunks)
        for number, one in enumerate(chunks):
            self.batching.append(one.member, [step.tokens[number] for step in drawn])
            if len(drawn) > 1:
                self.batching.computed([Chunk(one.member, one.start + 1, len(drawn) - 1, True)])


class Counted(NamedTuple):
    """The output layer of a decoder, and how many rows went through it at a time."""

    matrix: Matrix
    num_rows: list[int]

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_rows.append(len(rows))
        return self.matrix.times(rows)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_a_step_that_draws_nothing_leaves_the_output_layer_out(family, tmp_path):
    loaded = load(family, tmp_path, max_position_embeddings=1024)
    desk, num_rows = Desk(loaded), []
    decoder = desk.runner._decoder
    if decoder is None:
        loaded.model.lm_head.register_forward_hook(lambda _, given, __: num_rows.append(given[0].shape[-2]))
    else:
        assert decoder._head is not None
        decoder._head = Counted(decoder._head, num_rows)  # pyright: ignore[reportAttributeAccessIssue]
    desk.add(1, 600)
    for drawn in (0, 1):
        chunks = desk.batching.plan()
        assert len(desk.runner.run(chunks, desk.wanted(chunks)).tokens) == drawn
        desk.batching.computed(chunks)
    assert num_rows == [0, desk.runner._min_rows]


def test_a_burst_is_the_steps_it_is_made_of_to_the_last_bit(tmp_path):
    loaded = load("qwen3", tmp_path)
    lengths = (3, 31, 60, 130, 7)
    one_by_one, at_once = Desk(loaded), Desk(loaded)
    for desk in (one_by_one, at_once):
        for number, length in enumerate(lengths, 1):
            desk.add(number, length)
        desk.step()
    expected = [one_by_one.step() for _ in range(12)]
    found: list[Drawn] = []
    while len(found) < 12:
        chunks = at_once.batching.plan()
        assert at_once.batching.reserve(12 - len(found))
        drawn = at_once.runner.run_burst(chunks, at_once.wanted(chunks), 12 - len(found))
        at_once.take_in(chunks, drawn)
        found += drawn
    assert found == expected


def test_an_interrupted_burst_ends_with_its_step(tmp_path):
    desk = Desk(load("qwen3", tmp_path))
    desk.add(1, 5)
    desk.step()
    chunks = desk.batching.plan()
    assert desk.batching.reserve(8)
    interrupted = threading.Event()
    interrupted.set()
    assert len(desk.runner.run_burst(chunks, desk.wanted(chunks), 8, interrupted)) == 1


def test_contexts_of_very_different_lengths_attend_apart_and_draw_the_same(tmp_path):
    loaded = load("llama", tmp_path, max_position_embeddings=1024)
    together, alone = Desk(loaded), Desk(loaded)
    for number, length in ((1, 9), (2, 300), (3, 20), (4, 12), (5, 5), (6, 30)):
        together.add(number, length)
    alone.add(2, 300)
    for _ in range(6):
        both = together.step(), alone.step()
        assert (both[0].tokens[1], both[0].logprobs[1]) == (both[1].tokens[0], both[1].logprobs[0])


def test_changed_weights_are_used_once_they_are_packed(tmp_path):
    loaded = load("qwen3", tmp_path)
    desk, as_it_was = Desk(loaded), Desk(load("qwen3", tmp_path))
    for one in (desk, as_it_was):
        one.add(1, 9)
    assert desk.step() == as_it_was.step()
    with torch.no_grad():
        loaded.model.lm_head.weight.mul_(0.5)
    desk.runner.change_weights(None)
    fresh = Desk(loaded)
    for one in (desk, as_it_was, fresh):
        one.batching.remove_all()
        one.add(2, 9)
    changed = desk.step()
    assert changed == fresh.step()
    assert changed.logprobs != as_it_was.step().logprobs


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_what_is_no_number_does_not_stay_in_the_cache_for_the_next_sample(family, tmp_path):
    loaded = load(family, tmp_path, tie_word_embeddings=False)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[510] = float("nan")
    clean, desk = Desk(loaded), Desk(loaded)
    ill = Member(LeaseId(99), [510] * 9, 500)
    desk.batching.add(ill)
    desk.runner.run([desk.batching.plan()[0]._replace(samples=False)], [])
    desk.batching.remove(ill.lease)
    for one in (clean, desk):
        for number in range(3):
            one.add(number, 7)
    for _ in range(6):
        assert desk.step() == clean.step()


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_a_prompt_with_a_token_that_is_no_number_shows_it_however_long_ago_that_was(family, tmp_path):
    loaded = load(family, tmp_path, tie_word_embeddings=False)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[510] = float("nan")
    desk = Desk(loaded)
    ill, well = Member(LeaseId(9), [5, 510, *range(20, 60)], 500), desk.add(1, 30)
    desk.batching.add(ill)
    for _ in range(3):
        drawn = desk.step()
        assert [math.isnan(one) for one in drawn.logprobs] == [False, True]
    assert all(0 <= one < 510 for one in well.tokens)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_keys_and_values_that_are_no_numbers_show_in_what_is_drawn(family, tmp_path):
    for name in ("k_proj", "v_proj"):
        loaded = load(family, tmp_path / name)
        getattr(loaded.model.model.layers[1].self_attn, name).weight.data[3, 3] = float("nan")
        assert all(math.isnan(one) for drawn in Desk(loaded).run(9) for one in drawn.logprobs)


def test_a_window_that_a_family_does_not_look_at_changes_nothing(tmp_path):
    plain, configured = load("llama", tmp_path / "plain"), load("llama", tmp_path / "window", sliding_window=4)
    assert Desk(plain).run(30) == Desk(configured).run(30)


def test_planning_several_draws_at_once_gives_the_numbers_of_each():
    device = torch.device("cpu")
    seeds, positions = [3, 1 << 40], [5, 900]
    several = sampling.plan_draws([ON, ON], seeds, torch.tensor([[5, 900], [6, 901]]).numpy(), device)
    for number in range(2):
        one = sampling.plan_draws([ON, ON], seeds, [at + number for at in positions], device)
        assert torch.equal(several.uniforms[number], one.uniforms)
