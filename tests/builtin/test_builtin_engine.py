"""The builtin engine: the contract; jobs that are refused; ends; draws; installs. The model is tiny and random.

What it must write comes from transformers (reference.py), or from the same sample on an engine that nothing disturbed.
"""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.builtin.reference import TOLERANCE, Reference
from tests.builtin.stage import GREEDY, answers, config, engine, play
from tests.builtin.tiny_models import letters_of, save_tiny

from polyrl.engines.builtin import models, sampling
from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.engines.builtin.engine import BuiltinEngine
from polyrl.engines.builtin.runner import Runner
from polyrl.engines.contract import ON, EngineContract, RecordingSink, Stage
from polyrl.engines.engine import Engine, EngineError, Job, Weights
from polyrl.ids import LeaseId, SampleId, Version
from polyrl.wire.frames import Sampling

PROMPT = [17, 301, 42, 9, 77]
CONTEXT = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny("qwen3", tmp_path_factory.mktemp("old"), max_position_embeddings=CONTEXT, tokenizer=True)


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    """The same model with other weights."""
    return save_tiny("qwen3", tmp_path_factory.mktemp("new"), seed=1, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


@pytest.fixture(scope="module")
def newer_reference(newer):
    return Reference(newer)


class TestBuiltinEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _model(self, folder):
        self.folder = folder

    def engine(self) -> Engine:
        return engine(self.folder, slots=8, kv_tokens=8 * CONTEXT)

    def weights(self, version: int) -> Weights:
        return Weights(Version(version), folder=str(self.folder))


class LookingRunner(Runner):
    """As on a GPU: a burst is shown piece by piece, and goes on when answers are over."""

    shows_bursts = True
    num_looks = 0

    def run_burst(self, chunks, wanted, num_steps, interrupted=None, look=None):
        drawn = super().run_burst(chunks, wanted, num_steps, interrupted)
        assert interrupted is not None
        assert look is not None
        while len(drawn) > 3:
            look(drawn[:3])
            self.num_looks += 1
            time.sleep(0.001)
            drawn = drawn[3:]
            if interrupted.is_set():
                return drawn[:1]
        return drawn


class RunnerEngine(BuiltinEngine):
    """With a runner of another kind."""

    def __init__(self, config: BuiltinConfig, make: Callable[[models.Loaded, int, int], Runner]) -> None:
        super().__init__(config)
        self._make = make

    def _make_runner(self, loaded):
        return self._make(loaded, self._cache.num_blocks, self._cache.block_tokens)


class TestLookingEngine(TestBuiltinEngine):
    def engine(self) -> Engine:
        return RunnerEngine(config(self.folder, slots=8, kv_tokens=8 * CONTEXT), LookingRunner)


# Jobs


def test_an_answer_that_fills_the_context_and_whose_end_was_not_heard_of_ends_at_once(folder):
    async def script(stage: Stage) -> None:
        lease = stage.begin(prompt=[5] * 100, so_far=[5] * 28, max_tokens=40, sampling=ON)
        assert await stage.sink.end_of(lease) == "length"

    play(script, folder, max_context=128)


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [5, 512]}, "token ids go from 0 to 511; got 5 to 512"),
        ({"so_far": [1 << 40]}, "token ids go from 0 to 511"),
        ({"prompt": [5] * 128}, "are 128 tokens, and the model's context is 128"),
        ({"prompt": [5] * 100, "so_far": [5] * 30, "max_tokens": 40}, "are 130 tokens, and the model's context is 128"),
        ({"prompt": [5] * 60, "max_tokens": 50}, "110 tokens do not fit into the cache of 96"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_that_cannot_run_is_refused_and_the_others_go_on(folder, reference, job, why):
    async def script(stage: Stage) -> None:
        going_on = stage.begin(prompt=PROMPT, max_tokens=60, sampling=GREEDY)
        await stage.sink.some_of(going_on)
        refused = stage.begin(**{"prompt": PROMPT, **job})
        assert await stage.sink.end_of(refused) == "refused"
        detail = stage.sink.ends[refused][1]
        assert why in detail
        assert "\n" not in detail
        assert going_on not in stage.sink.ends
        assert await answers(stage, [going_on]) == [reference.greedy(PROMPT, 60)]
        assert stage.engine.health() is None

    play(script, folder, kv_tokens=96, max_context=128)


def test_without_weights_jobs_are_refused_until_a_version_is_installed(folder):
    async def script() -> None:
        one, sink = engine(folder, version=None), RecordingSink()
        info = await one.start(sink)
        stage = Stage(one, sink, info, PROMPT)
        assert info.version is None
        refused = stage.begin()
        assert await sink.end_of(refused) == "refused"
        assert sink.ends[refused][1] == "no weights are installed"
        await one.install(Weights(Version(4), folder=str(folder)))
        lease = stage.begin()
        await sink.end_of(lease)
        assert set(sink.versions[lease]) == {4}
        await one.close()

    asyncio.run(script())


def test_a_cache_without_a_block_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="kv_tokens: got 16, expected at least block_tokens=32"):
        BuiltinEngine(BuiltinConfig(model="nowhere", kv_tokens=16, block_tokens=32))


def test_a_model_that_cannot_be_loaded_fails_the_start_with_a_line_and_closing_is_still_fine(tmp_path):
    async def script() -> None:
        one = engine(tmp_path)
        with pytest.raises(EngineError, match="no config"):
            await one.start(RecordingSink())
        await one.close()
        await one.close()

    asyncio.run(script())


@pytest.mark.parametrize("block_tokens", [1, 1024])
def test_a_cache_that_no_memory_holds_is_refused_in_a_line(folder, block_tokens):
    async def script() -> None:
        one = engine(folder, kv_tokens=10**15, block_tokens=block_tokens)
        with pytest.raises(
            EngineError, match=r"kv_tokens: no cache of [\d,]+ tokens, [\d,]+ bytes, could be made"
        ) as said:
            await one.start(RecordingSink())
        assert "\n" not in str(said.value)
        await one.close()

    asyncio.run(script())


# Ends


async def undisturbed(folder, **job: Any) -> list[int]:
    """What an engine of its own writes."""
    async with EngineContract().on_stage(engine(folder)) as stage:
        return await stage.text(**{"prompt": PROMPT, "max_tokens": 40, "sampling": ON, **job})


def whole_answer(folder, **job: Any) -> list[int]:
    return asyncio.run(undisturbed(folder, **job))


def first_of_its_kind(text: list[int], start: int) -> int:
    """A place at or after `start` whose token was not there before."""
    return next(at for at in range(start, len(text)) if text[at] not in text[:at])


def test_the_models_own_end_of_text_ends_an_answer_unless_it_is_ignored(folder, tmp_path):
    whole = whole_answer(folder, seed=3)
    at = first_of_its_kind(whole, 7)
    save_tiny("qwen3", tmp_path, max_position_embeddings=CONTEXT, eos_token_id=[500, whole[at]])

    async def script(stage: Stage) -> None:
        job = {"prompt": PROMPT, "max_tokens": 40, "seed": 3}
        lease = stage.begin(**job, sampling=Sampling())
        assert await stage.sink.end_of(lease) == "stop"
        assert stage.sink.texts[lease] == whole[: at + 1]
        assert await stage.text(**job, sampling=ON) == whole
        stop = whole[at + 1]
        assert (
            await stage.text(**job, sampling=Sampling(ignore_eos=True, stop_ids=(stop,)))
            == (whole[: whole.index(stop) + 1])
        )
        resumed = stage.begin(**job, so_far=whole[: at + 1], sampling=Sampling())
        assert await stage.sink.end_of(resumed) == "stop", "it had ended, and nobody had heard of it"
        assert resumed not in stage.sink.texts

    play(script, tmp_path)


def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(folder):
    whole = whole_answer(folder, seed=3)

    async def script(stage: Stage) -> None:
        assert stage.info.capabilities.stop_strings
        stops = ("nowhere", letters_of(whole[9:12]))
        job = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "sampling": Sampling(ignore_eos=True, stop=stops)}
        lease = stage.begin(**job)
        assert await stage.sink.end_of(lease) == "stop"
        assert stage.sink.texts[lease] == whole[:12]
        assert whole[:11] + await stage.text(**job, so_far=whole[:11]) == whole[:12], "it began on another engine"
        resumed = stage.begin(**job, so_far=whole[:12])
        assert await stage.sink.end_of(resumed) == "stop"
        assert resumed not in stage.sink.texts
        of_prompt = Sampling(ignore_eos=True, stop=(letters_of(PROMPT[-2:]),))
        assert await stage.text(**{**job, "sampling": of_prompt}) == whole

    play(script, folder)


def test_a_stop_string_may_have_any_number_of_tokens(folder):
    whole = whole_answer(folder, seed=3, max_tokens=80)

    async def script(stage: Stage) -> None:
        sampling = Sampling(ignore_eos=True, stop=(letters_of(whole[5:65]),))
        assert await stage.text(prompt=PROMPT, seed=3, max_tokens=80, sampling=sampling) == whole[:65]

    play(script, folder)


def test_stop_strings_are_refused_where_there_is_no_tokenizer(newer):
    async def script(stage: Stage) -> None:
        assert not stage.info.capabilities.stop_strings
        lease = stage.begin(sampling=Sampling(stop=("done",)))
        assert await stage.sink.end_of(lease) == "refused"
        assert "stop strings need a tokenizer" in stage.sink.ends[lease][1]
        assert await stage.text()

    play(script, newer)


def test_a_tokenizer_that_cannot_be_read_is_as_good_as_none(tmp_path):
    (save_tiny("llama", tmp_path) / "tokenizer.json").write_text("{ what is this")

    async def script(stage: Stage) -> None:
        assert not stage.info.capabilities.stop_strings
        assert await stage.text()

    play(script, tmp_path)


@pytest.mark.parametrize("is_running", [False, True])
def test_a_lease_that_is_given_twice_is_answered_once(folder, is_running):
    async def script(stage: Stage) -> None:
        job = Job(LeaseId(7001), SampleId(1), PROMPT, [], 50, 3, ON)
        stage.engine.generate(job)
        if is_running:
            await stage.sink.some_of(job.lease)
        stage.engine.generate(job)
        assert await stage.sink.end_of(job.lease) == "length"
        assert await stage.text(max_tokens=60, sampling=ON)
        assert len(stage.sink.texts[job.lease]) == 50
        assert (stage.engine.stats().num_running, stage.engine.stats().kv_used) == (0, 0.0)

    play(script, folder)


def test_an_answer_ends_where_the_context_does(folder, reference):
    async def script(stage: Stage) -> None:
        lease = stage.begin(prompt=PROMPT, max_tokens=100, sampling=GREEDY)
        assert await stage.sink.end_of(lease) == "length"
        assert stage.sink.texts[lease] == reference.greedy(PROMPT, 32 - len(PROMPT))

    play(script, folder, max_context=32)


# Draws


JOBS = [
    {"prompt": PROMPT * (1 + seed % 4), "seed": seed, "max_tokens": 30 + 2 * seed, "sampling": one}
    for seed, one in enumerate([ON, Sampling(temperature=0.7, top_p=0.8, ignore_eos=True)] * 8)
]


def test_the_same_seed_draws_the_same_tokens_alone_in_a_crowd_and_after_preemption(folder):
    async def alone(stage: Stage) -> None:
        expected.extend([await stage.text(**job) for job in JOBS])

    async def together(stage: Stage) -> None:
        assert await answers(stage, [stage.begin(**job) for job in JOBS]) == expected

    async def squeezed(stage: Stage) -> None:
        await together(stage)
        assert stage.engine.stats().num_preemptions > 3

    expected: list[list[int]] = []
    play(alone, folder)
    assert len(set(map(tuple, expected))) == 16
    play(together, folder)
    play(together, folder, chunk_tokens=3, slots=5, block_tokens=1)
    play(squeezed, folder, kv_tokens=320, block_tokens=4)


def test_a_burst_that_is_looked_at_while_it_runs_draws_the_same_tokens(folder):
    jobs = [{"prompt": PROMPT, "seed": seed, "max_tokens": 5 + 11 * seed, "sampling": ON} for seed in range(8)]

    async def as_it_is(stage: Stage) -> None:
        expected.extend([await stage.text(**job) for job in jobs])

    async def looked_at(stage: Stage) -> None:
        assert await answers(stage, [stage.begin(**job) for job in jobs]) == expected
        looking: Any = stage.engine
        assert looking._runner.num_looks > 3
        assert stage.engine.stats().num_running == 0
        cached = stage.begin(**jobs[7])  # what an answer left in the cache is right
        assert await answers(stage, [cached]) == [expected[7]]

    expected: list[list[int]] = []
    play(as_it_is, folder)
    for settings in ({}, {"slots": 3, "block_tokens": 4}, {"kv_tokens": 160, "block_tokens": 4}):
        EngineContract().play(looked_at, RunnerEngine(config(folder, **settings), LookingRunner))


def test_a_sample_resumed_anywhere_goes_on_with_the_same_draws(folder):
    whole = whole_answer(folder, seed=11)

    async def script(stage: Stage) -> None:
        parts = [stage.begin(prompt=PROMPT, so_far=whole[:at], seed=11, max_tokens=40, sampling=ON) for at in range(40)]
        for at, rest in enumerate(await answers(stage, parts)):
            assert whole[:at] + rest == whole

    play(script, folder)


def test_seeds_may_be_any_integers(folder):
    texts = [whole_answer(folder, seed=seed) for seed in (-1, 1 << 63, (1 << 64) + 5, 5)]
    assert texts[2] == texts[3], "63 bits count"
    assert len(set(map(tuple, texts))) == 3


def exceeded(chi_square: float, degrees: int) -> float:
    """How likely a larger one is (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return math.erfc(((chi_square / degrees) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread)) / 2


def p_value(counts: Counter[int], probabilities: "np.ndarray[Any, Any]") -> float:
    """Of a chi-square test, with tokens that are expected fewer than 5 times put together."""
    num = counts.total()
    often = np.flatnonzero(num * probabilities >= 5)
    observed = np.array([counts[int(token)] for token in often] + [num - sum(counts[int(token)] for token in often)])
    expected = np.append(num * probabilities[often], num * (1 - probabilities[often].sum()))
    return exceeded(((observed - expected) ** 2 / expected).sum(), len(often))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_drawn_tokens_are_distributed_as_the_model_says(folder, reference, temperature):
    async def script(stage: Stage) -> None:
        one = Sampling(temperature=temperature, ignore_eos=True)
        leases = [stage.begin(prompt=PROMPT, seed=seed, max_tokens=1, sampling=one) for seed in range(3000)]
        counts = Counter(text[0] for text in await answers(stage, leases))
        probabilities = reference.distributions(PROMPT, [0], temperature)[0].exp().double().numpy()
        assert p_value(counts, probabilities) > 0.01
        off = reference.distributions(PROMPT, [0], 1.5 * temperature)[0].exp().double().numpy()
        assert p_value(counts, off) < 1e-6, "the test would see a wrong temperature"

    play(script, folder, slots=500)


@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_the_random_numbers_are_even_along_seeds_and_along_positions(along):
    num, cells = 100_000, 100
    one, many = [7] * num, list(range(num))
    drawn = sampling.uniforms(*((many, one) if along == "seeds" else (one, many)))
    assert 0 <= drawn.min() <= drawn.max() < 1
    counts = np.histogram(drawn, cells, (0, 1))[0]
    assert 0.001 < exceeded(((counts - num / cells) ** 2 / (num / cells)).sum(), cells - 1) < 0.999
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01


def kept(logprobs: torch.Tensor, one: Sampling) -> torch.Tensor:
    """Which tokens may be drawn: (vocabulary,). Written anew, from the definitions; the edge is taken generously."""
    slack = 1e-4
    probabilities = logprobs.exp()
    order = logprobs.argsort(descending=True)
    least = logprobs[order[min(one.top_k, len(order)) - 1]] if one.top_k else logprobs.min()
    stays = (logprobs >= least - slack) & (probabilities >= one.min_p * probabilities.max() * (1 - slack))
    left = torch.where(stays, probabilities, 0.0)[order]
    above = torch.zeros_like(left)
    above[order] = (left.cumsum(0) - left) / left.sum()
    return stays & (above < one.top_p + slack)


@pytest.mark.parametrize(
    "one",
    [
        Sampling(top_k=4),
        Sampling(top_k=1),
        Sampling(top_p=0.35, temperature=0.8),
        Sampling(top_p=1e-6),
        Sampling(top_p=1e-300),
        Sampling(min_p=0.3),
        Sampling(min_p=1.0),
        Sampling(top_k=40, top_p=0.7, min_p=0.05, temperature=1.3),
        Sampling(top_k=100_000, top_p=0.999999),
    ],
    ids=lambda one: ",".join(f"{key}={getattr(one, key):g}" for key in ("temperature", "top_k", "top_p", "min_p")),
)
def test_what_is_truncated_is_never_drawn_and_log_probabilities_are_those_before(folder, reference, one):
    async def script(stage: Stage) -> None:
        leases = [
            stage.begin(prompt=PROMPT, seed=seed, max_tokens=12, sampling=structs.replace(one, ignore_eos=True))
            for seed in range(32)
        ]
        texts = await answers(stage, leases)
        for lease, text in zip(leases, texts, strict=True):
            rows = reference.distributions(PROMPT, text, one.temperature)
            assert all(kept(row, one)[token] for row, token in zip(rows, text, strict=True))
            assert reference.error(PROMPT, text, stage.sink.logprobs[lease], one.temperature) < TOLERANCE
        num_allowed = int(kept(reference.distributions(PROMPT, [0], one.temperature)[0], one).sum())
        assert min(num_allowed, 4) <= len({text[0] for text in texts}) <= num_allowed

    play(script, folder)


def test_at_temperature_0_the_likeliest_is_taken_whatever_the_seed_and_truncation(folder, reference):
    async def script(stage: Stage) -> None:
        expected = reference.greedy(PROMPT, 20)
        for one in (GREEDY, Sampling(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5, ignore_eos=True)):
            for seed in (1, 2):
                lease = stage.begin(prompt=PROMPT, seed=seed, max_tokens=20, sampling=one)
                assert await answers(stage, [lease]) == [expected]
                assert reference.error(PROMPT, expected, stage.sink.logprobs[lease]) < TOLERANCE

    play(script, folder)


# Weights


async def install_in_the_middle(stage: Stage, weights: Weights, **job: Any) -> tuple[LeaseId, list[int], list[int]]:
    """A long answer over an install: its lease, what the old weights wrote, and what the new ones did."""
    lease = stage.begin(prompt=PROMPT, max_tokens=120, **job)
    await stage.sink.until(lambda: len(stage.sink.texts.get(lease, ())) > 20)
    await stage.engine.install(weights)
    (text,) = await answers(stage, [lease])
    num_old = stage.sink.versions[lease].count(Version(0))
    assert stage.sink.versions[lease] == [0] * num_old + [1] * (120 - num_old)
    assert 20 < num_old < 120
    return lease, text[:num_old], text[num_old:]


@pytest.mark.parametrize("one", [GREEDY, ON], ids=["greedy", "drawn"])
def test_after_an_install_with_recompute_all_is_as_the_new_weights_have_it(folder, newer, newer_reference, one):
    async def script(stage: Stage) -> None:
        weights = Weights(Version(1), folder=str(newer))
        lease, old, new = await install_in_the_middle(stage, weights, seed=5, sampling=one)
        assert new == await undisturbed(newer, seed=5, so_far=old, max_tokens=120, sampling=one)
        if one is GREEDY:
            assert new == newer_reference.greedy(PROMPT + old, len(new))
        logprobs = stage.sink.logprobs[lease][len(old) :]
        assert newer_reference.error(PROMPT + old, new, logprobs) < TOLERANCE
        assert await stage.text(prompt=PROMPT, max_tokens=40, sampling=GREEDY) == newer_reference.greedy(PROMPT, 40)

    play(script, folder, after_install="recompute")


def test_after_an_install_that_keeps_the_cache_new_weights_go_on_over_old_keys_and_values(
    folder, newer, reference, newer_reference
):
    async def script(stage: Stage) -> None:
        _, old, new = await install_in_the_middle(stage, Weights(Version(1), folder=str(newer)), sampling=GREEDY)
        assert new == greedy_over_cache_of(reference, newer_reference, PROMPT + old, len(new))
        assert new != newer_reference.greedy(PROMPT + old, len(new)), "the old cache made no difference"
        after = await stage.text(prompt=PROMPT + old, max_tokens=len(old) + 5, sampling=GREEDY)
        assert after == newer_reference.greedy(PROMPT + old, len(old) + 5), "what is new shares nothing with it"

    play(script, folder, after_install="keep", block_tokens=4)


@torch.no_grad()
def greedy_over_cache_of(old: Reference, new: Reference, text: list[int], num_tokens: int) -> list[int]:
    """What `new` writes after a text whose tokens, all but the last, `old` has computed."""
    cache = old.model(torch.tensor([text[:-1]]), use_cache=True).past_key_values
    last, made = text[-1], []
    for _ in range(num_tokens):
        last = int(new.model(torch.tensor([[last]]), past_key_values=cache, use_cache=True).logits[0, -1].argmax())
        made.append(last)
    return made


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_prompt_cached_under_the_old_weights_is_not_used_under_the_new(folder, newer, newer_reference, policy):
    async def script(stage: Stage) -> None:
        prompt = PROMPT * 10
        await stage.text(prompt=prompt, sampling=GREEDY)
        await stage.engine.install(Weights(Version(1), folder=str(newer)))
        assert await stage.text(prompt=prompt, sampling=GREEDY) == newer_reference.greedy(prompt, 16)

    play(script, folder, after_install=policy, block_tokens=4)


@pytest.mark.parametrize("one", [ON, GREEDY, Sampling(top_k=3, temperature=0.7, ignore_eos=True)])
@pytest.mark.parametrize("spoiled", ["mlp.down_proj", "self_attn.v_proj"])
def test_weights_that_give_no_numbers_end_their_samples_and_good_ones_go_on_afterwards(folder, reference, one, spoiled):
    model, sharing = shared(folder)
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    async def script(stage: Stage) -> None:
        running = [stage.begin(prompt=[*PROMPT, n], seed=n, max_tokens=2000, sampling=ON) for n in range(3)]
        for lease in running:
            await stage.sink.some_of(lease)

        def spoil() -> None:
            model.model.layers[0].get_submodule(spoiled).weight.data[3, 3] = math.nan

        await stage.engine.install(Weights(Version(1), in_place=True, write=spoil))
        for lease in (*running, stage.begin(prompt=PROMPT, sampling=one)):
            assert await stage.sink.end_of(lease) == "engine_failed"
            assert stage.sink.ends[lease][1] == "version 1 gives no numbers"
        assert stage.engine.health() is None
        await stage.engine.install(Weights(Version(2), in_place=True, write=lambda: model.load_state_dict(good)))
        after = [stage.begin(prompt=PROMPT, max_tokens=20, sampling=GREEDY) for _ in range(2)]
        assert await answers(stage, after) == [reference.greedy(PROMPT, 20)] * 2

    EngineContract().play(script, sharing)


def nowhere(_) -> None:
    """A folder that is empty."""


WRONG: dict[str, Callable[[Any], Any]] = {
    "no config.json there": nowhere,
    "its weights are not of this model": lambda folder: save_tiny("qwen3", folder, intermediate_size=64),
    "is of another model: rms_norm_eps: got 0.5, ": lambda folder: save_tiny("qwen3", folder, rms_norm_eps=0.5),
    "is of another model: model_type: got llama, expected qwen3": lambda folder: save_tiny("llama", folder),
    "its weights cannot be loaded": lambda folder: (save_tiny("qwen3", folder) / "model.safetensors").write_text("?"),
}


@pytest.mark.parametrize("complaint", WRONG)
def test_wrong_weights_are_refused_and_the_old_ones_go_on(folder, reference, tmp_path, complaint):
    WRONG[complaint](tmp_path)

    async def script(stage: Stage) -> None:
        lease = stage.begin(prompt=PROMPT, max_tokens=120, sampling=GREEDY)
        await stage.sink.some_of(lease)
        with pytest.raises(EngineError, match=complaint):
            await stage.engine.install(Weights(Version(1), folder=str(tmp_path)))
        assert await answers(stage, [lease]) == [reference.greedy(PROMPT, 120)]
        assert set(stage.sink.versions[lease]) == {0}
        assert stage.engine.health() is None

    play(script, folder)


def test_a_version_that_is_nowhere_is_refused(folder):
    async def script(stage: Stage) -> None:
        with pytest.raises(EngineError, match="version 1 has no known source"):
            await stage.engine.install(Weights(Version(1)))
        await stage.engine.install(Weights(Version(0)))
        assert await stage.text()

    play(script, folder)


def shared(folder) -> tuple[Any, BuiltinEngine]:
    """A model as a trainer has it, and an engine that shares its weights."""
    model: Any = models.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = BuiltinConfig(model=str(folder), kv_tokens=4096)
    return model, BuiltinEngine(config, models.describe(model, "shared"))


def test_weights_shared_with_a_trainer_are_used_where_they_are(folder, newer, newer_reference):
    model, one = shared(folder)

    async def script(stage: Stage) -> None:
        assert stage.info.model == "shared"
        assert await stage.text(prompt=PROMPT, max_tokens=40, sampling=ON) == await undisturbed(folder)
        with torch.no_grad():
            for ours, new in zip(model.parameters(), newer_reference.model.parameters(), strict=True):
                ours.copy_(new)
        await stage.engine.install(Weights(Version(1), in_place=True))
        lease = stage.begin(prompt=PROMPT, max_tokens=40, sampling=GREEDY)
        assert await answers(stage, [lease]) == [newer_reference.greedy(PROMPT, 40)]
        assert set(stage.sink.versions[lease]) == {1}

    EngineContract().play(script, one)
    text = torch.tensor([PROMPT])
    assert torch.allclose(model(text).logits, newer_reference.model(text).logits, atol=1e-5), "it can still be trained"


def test_an_install_that_nobody_waits_for_any_more_still_writes_its_version_down(folder, newer):
    async def script(stage: Stage) -> None:
        lease = stage.begin(prompt=PROMPT, max_tokens=1000, sampling=ON)
        await stage.sink.some_of(lease)
        install = asyncio.create_task(stage.engine.install(Weights(Version(1), folder=str(newer))))
        await asyncio.sleep(0)  # it has begun
        install.cancel()
        with pytest.raises(asyncio.CancelledError):
            await install
        await stage.sink.until(lambda: stage.sink.versions[lease][-1] == 1 or lease in stage.sink.ends)
        await stage.engine.abort(lease)
        text = stage.sink.texts[lease]
        num_old = stage.sink.versions[lease].count(Version(0))
        assert 0 < num_old < len(text), "the install came within the answer"
        expected = await undisturbed(folder, seed=1, max_tokens=num_old)
        assert text[:num_old] == expected
        assert text[num_old:] == await undisturbed(newer, seed=1, so_far=expected, max_tokens=len(text))

    play(script, folder)


# Ending


def test_a_conversation_whose_tool_runs_keeps_its_cache_until_somebody_who_runs_needs_the_room(folder):
    """No rule of the scheduler keeps or drops it (docs/concepts/episodes.md): kept, it costs nobody a place."""

    async def script(stage: Stage) -> None:
        async def turn(said: list[int], num_given: int) -> int:
            """Hold a turn of a conversation; return how many tokens of its prompt were not computed again."""
            before = stage.engine.stats().num_reused
            said += [*(await stage.text(prompt=list(said), max_tokens=8, sampling=GREEDY)), *range(50, 50 + num_given)]
            assert stage.engine.stats().kv_used == 0.0, "what a conversation left behind takes no room"
            return stage.engine.stats().num_reused - before

        first, second = list(range(100, 164)), list(range(200, 264))
        assert await turn(first, 8) == await turn(second, 8) == 0
        assert await turn(first, 8) >= 64, "beside another one that fits"
        assert await turn(list(range(300, 420)), 0) == 0
        assert await turn(first, 8) >= 64, "the one that nobody asked for longest went first"
        assert await turn(second, 8) < 64
        assert await turn(list(range(200, 432)), 0) < 200, "somebody who needs all of it"
        assert await turn(first, 8) < 64

    play(script, folder, slots=4, kv_tokens=256, block_tokens=8)


def test_an_abort_frees_place_and_cache_at_once(folder):
    async def script(stage: Stage) -> None:
        leases = [stage.begin(seed=seed, max_tokens=1000, sampling=ON) for seed in range(6)]
        await stage.sink.some_of(leases[3])
        await stage.sink.until(lambda: stage.engine.stats().num_running == 4)
        assert stage.engine.stats().num_waiting == 2
        for lease in (leases[5], *leases[:3]):
            await stage.engine.abort(lease)
        assert stage.engine.stats().num_running + stage.engine.stats().num_waiting == 2
        await stage.sink.some_of(leases[4])
        for lease in leases[3:5]:
            await stage.engine.abort(lease)
        stats = stage.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_used) == (0, 0, 0.0)

    play(script, folder, slots=4)


def test_after_closing_its_thread_is_gone_and_nothing_is_taken_any_more(folder):
    async def script() -> None:
        one, sink = engine(folder), RecordingSink()
        await one.start(sink)
        job = Job(LeaseId(1), SampleId(1), PROMPT, [], 1000, 1, ON)
        one.generate(job)
        await sink.some_of(LeaseId(1))
        await one.close()
        await one.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("builtin-engine")]
        assert one.health() == "the engine is closed"
        one.generate(job._replace(lease=LeaseId(2)))
        with pytest.raises(EngineError, match="does not run"):
            await one.install(Weights(Version(1), folder=str(folder)))
        await asyncio.sleep(0)
        assert not sink.ends

    asyncio.run(script())


class GatedRunner(Runner):
    """Goes to sleep and wakes only while its gate is open."""

    def __init__(self, *its: Any) -> None:
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()
        self.done: list[str] = []
        super().__init__(*its)

    def sleep(self) -> None:
        self._pass()
        super().sleep()
        self.done.append("sleep")

    def wake(self) -> None:
        self._pass()
        super().wake()
        self.done.append("wake")

    def _pass(self) -> None:
        self.reached.set()
        assert self.gate.wait(30.0)


def test_closing_while_the_model_loads_waits_for_it_and_frees_what_it_made(folder):
    began, go_on = threading.Event(), threading.Event()
    made: list[GatedRunner] = []

    def make(*its: Any) -> Runner:
        began.set()
        assert go_on.wait(30.0), "the event loop stands still"
        made.append(GatedRunner(*its))
        return made[0]

    async def script() -> None:
        one = RunnerEngine(config(folder), make)
        starting = asyncio.create_task(one.start(RecordingSink()))
        await asyncio.to_thread(began.wait, 30.0)
        closing = asyncio.create_task(one.close())
        await asyncio.sleep(0)
        assert not closing.done()
        go_on.set()
        with pytest.raises(EngineError, match="closed before it had started"):
            await starting
        await closing
        assert made[0].done == ["wake", "sleep"]

    asyncio.run(script())


class FailingRunner(Runner):
    """A device that is lost in the middle of an answer."""

    what: BaseException = RuntimeError("the device is gone\nfor good")

    def run_burst(self, chunks, wanted, num_steps, interrupted=None, look=None):
        raise self.what


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (RuntimeError("the device is gone\nfor good"), "RuntimeError: the device is gone for good"),
        (RuntimeError(""), "RuntimeError"),
        (IndexError("3 is out of bounds"), "IndexError: 3 is out of bounds"),
    ],
)
def test_when_a_step_fails_every_sample_ends_and_so_does_what_comes_later(folder, monkeypatch, what, said):
    monkeypatch.setattr(FailingRunner, "what", what)
    end = ("engine_failed", f"a step failed: {said}")

    async def script(stage: Stage) -> None:
        leases = [stage.begin(prompt=PROMPT) for _ in range(3)]  # one of them waits for a slot
        for lease in leases:
            await stage.sink.end_of(lease)
        assert [stage.sink.ends[lease] for lease in leases] == [end] * 3
        stats = stage.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_used) == (0, 0, 0.0)
        assert (stats.down, stats.num_outages) == (end[1], 1)
        assert stage.engine.health() == end[1]
        late = stage.begin(prompt=PROMPT)
        await stage.sink.end_of(late)
        assert stage.sink.ends[late] == end
        with pytest.raises(EngineError, match="a step failed"):
            await stage.engine.install(Weights(Version(1), folder=str(folder)))

    EngineContract().play(script, RunnerEngine(config(folder, slots=2), FailingRunner))


# Sleep


def test_asleep_it_writes_nothing_and_awake_it_goes_on_to_the_same_answers(folder):
    jobs = [Job(LeaseId(n), SampleId(n), [*PROMPT, n], [], 40, n, Sampling(ignore_eos=True)) for n in range(1, 4)]

    async def undisturbed(stage: Stage) -> None:
        for job in jobs:
            stage.engine.generate(job)
        expected.extend(await answers(stage, [job.lease for job in jobs]))

    async def interrupted(stage: Stage) -> None:
        sleeper = stage.engine
        assert isinstance(sleeper, BuiltinEngine)
        for job in jobs:
            sleeper.generate(job)
        while not all(stage.sink.texts.get(job.lease) for job in jobs):
            await asyncio.sleep(0.001)
        await sleeper.sleep()
        await sleeper.sleep()
        num = {job.lease: len(stage.sink.texts[job.lease]) for job in jobs}
        assert sleeper.stats().kv_used == 0.0
        await asyncio.sleep(0.05)
        assert num == {job.lease: len(stage.sink.texts[job.lease]) for job in jobs}
        await sleeper.wake()
        assert await answers(stage, [job.lease for job in jobs]) == expected

    expected: list[list[int]] = []
    play(undisturbed, folder)
    play(interrupted, folder)


def test_who_stops_waiting_for_a_sleep_or_a_wake_does_not_stop_it_half_way(folder):
    made: list[GatedRunner] = []

    def make(*its: Any) -> Runner:
        made.append(GatedRunner(*its))
        return made[0]

    sleeper = RunnerEngine(config(folder), make)

    async def script(stage: Stage) -> None:
        (runner,) = made
        for turn in (sleeper.sleep, sleeper.wake):
            runner.gate.clear()
            runner.reached.clear()
            waiting = asyncio.create_task(turn())
            await asyncio.to_thread(runner.reached.wait, 30.0)
            waiting.cancel()
            await asyncio.sleep(0)
            assert not waiting.done(), "what its thread uses is not free yet"
            runner.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert runner.done == ["wake", "sleep", "wake"]
        await sleeper.wake()
        assert runner.done == ["wake", "sleep", "wake"], "it is awake, and knows it"
        assert await stage.text()

    EngineContract().play(script, sleeper)
