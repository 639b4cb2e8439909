"""Every family of models, tiny and random: what the engine writes is what transformers writes."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.builtin.reference import TOLERANCE, Reference
from tests.builtin.stage import GREEDY, answers, play
from tests.builtin.tiny_models import FAMILIES, save_tiny

from polyrl.engines.builtin import model_config, models
from polyrl.engines.contract import ON, Stage
from polyrl.engines.engine import EngineError
from polyrl.wire.frames import Sampling

NEW_TOKENS = 20
LENGTHS = (1, 3, 16, 23, 37, 64, 90)
"""Of prompts: shorter and longer than a block, a chunk, and the window of 24 that some families have."""


class Family(NamedTuple):
    folder: Path
    reference: Reference
    prompts: list[list[int]]
    greedy: list[list[int]]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory) -> Family:
    folder = save_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)
    reference = Reference(folder)
    draw = random.Random(request.param)
    prompts = [[draw.randrange(3, 512) for _ in range(length)] for length in LENGTHS]
    greedy = [reference.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    assert all(len(set(answer)) > 3 for answer in greedy), "an answer that repeats one token proves little"
    return Family(folder, reference, prompts, greedy)


async def check_greedy(stage: Stage, family: Family) -> None:
    leases = [stage.begin(prompt=prompt, max_tokens=NEW_TOKENS, sampling=GREEDY) for prompt in family.prompts]
    assert await answers(stage, leases) == family.greedy
    for lease, prompt, answer in zip(leases, family.prompts, family.greedy, strict=True):
        assert family.reference.error(prompt, answer, stage.sink.logprobs[lease]) < TOLERANCE


def test_mixed_lengths_in_one_batch_are_as_transformers_generates_them(family):
    play(lambda stage: check_greedy(stage, family), family.folder)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16])
def test_a_prompt_may_be_computed_in_chunks(family, chunk_tokens):
    play(lambda stage: check_greedy(stage, family), family.folder, chunk_tokens=chunk_tokens, block_tokens=4)


def test_a_full_cache_preempts_and_changes_nothing(family):
    async def script(stage: Stage) -> None:
        await check_greedy(stage, family)
        assert stage.engine.stats().num_preemptions > 0
        assert stage.engine.stats().kv_used == 0.0

    play(script, family.folder, kv_tokens=256, block_tokens=4, chunk_tokens=32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_group_of_8_shares_its_prompt_and_each_is_as_if_alone(family, temperature):
    async def script(stage: Stage) -> None:
        sampling = Sampling(temperature=temperature, ignore_eos=True)
        most = 0

        def all_ended() -> bool:
            nonlocal most
            most = max(most, stage.engine.stats().num_running)
            return all(lease in stage.sink.ends for lease in leases)

        leases = [stage.begin(prompt=prompt, seed=seed, max_tokens=16, sampling=sampling) for seed in range(8)]
        await stage.sink.until(all_ended)
        assert most == 8, "they do not fit together unless they share"
        assert stage.engine.stats().num_preemptions == 0
        texts = await answers(stage, leases)
        assert len(set(map(tuple, texts))) == 8
        for lease, text in zip(leases, texts, strict=True):
            assert family.reference.error(prompt, text, stage.sink.logprobs[lease], temperature) < TOLERANCE

    prompt = family.prompts[-1]
    play(script, family.folder, kv_tokens=256, block_tokens=8)


def test_later_samples_find_the_prompt_in_the_cache_of_those_that_ended(family):
    async def script(stage: Stage) -> None:
        for _ in range(2):
            await check_greedy(stage, family)

    play(script, family.folder, block_tokens=4)


def test_logits_are_made_of_the_last_layer_as_the_model_makes_them(family):
    loaded = models.load(str(family.folder), "float32", "cpu")
    tokens = torch.tensor([family.prompts[-1]])
    with torch.no_grad():
        hidden = loaded.model.model(input_ids=tokens).last_hidden_state
        assert torch.equal(loaded.logits(hidden), loaded.model(input_ids=tokens).logits)


MIXTURES = {"mixtral", "qwen3_moe"}


def test_seeds_are_said_to_survive_moves_where_answers_are_exact(family):
    async def script(stage: Stage) -> None:
        is_mixture = family.folder.name in MIXTURES
        assert stage.info.capabilities.seeds_survive_moves != is_mixture

    play(script, family.folder)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - MIXTURES), indirect=True)
def test_a_sample_is_the_same_to_the_last_bit_alone_in_a_crowd_resumed_and_preempted(family):
    def job(number: int, *, num_there: int = 0) -> dict[str, Any]:
        so_far = alone[number][0][:num_there] if num_there else []
        return {"prompt": family.prompts[number], "so_far": so_far, "seed": number, "max_tokens": 60, "sampling": ON}

    async def together(stage: Stage) -> None:
        leases = [stage.begin(**job(number)) for number in numbers]
        await answers(stage, leases)
        assert [(stage.sink.texts[lease], stage.sink.logprobs[lease]) for lease in leases] == alone

    async def squeezed(stage: Stage) -> None:
        await together(stage)
        assert stage.engine.stats().num_preemptions > 0

    async def resumed(stage: Stage) -> None:
        leases = [stage.begin(**job(number, num_there=7 * (number + 1))) for number in numbers]
        await answers(stage, leases)
        for number, lease in enumerate(leases):
            text, logprobs = alone[number]
            assert stage.sink.texts[lease] == text[7 * (number + 1) :]
            assert stage.sink.logprobs[lease] == logprobs[7 * (number + 1) :]

    async def one_by_one(stage: Stage) -> None:
        for number in numbers:
            lease = stage.begin(**job(number))
            (text,) = await answers(stage, [lease])
            alone.append((text, stage.sink.logprobs[lease]))

    alone: list[tuple[list[int], list[float]]] = []
    numbers = range(len(family.prompts))
    play(one_by_one, family.folder)
    play(together, family.folder)
    play(resumed, family.folder, chunk_tokens=11, block_tokens=4)
    play(squeezed, family.folder, kv_tokens=320, block_tokens=4)


# Directories


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


def test_weights_may_come_in_shards(tmp_path, whole):
    save_tiny("llama", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = models.load(str(tmp_path), "float32", "cpu").model.state_dict()
    for name, tensor in load_file(whole / "model.safetensors").items():
        assert torch.equal(ours[name], tensor)
    next(tmp_path.glob("*.safetensors")).unlink()
    assert "weights cannot be loaded" in refusal(tmp_path)


def test_loading_says_nothing_on_its_own(whole, capfd):
    models.load(str(whole), "float32", "cpu")
    assert capfd.readouterr() == ("", "")


def refusal(folder, *, dtype: str = "float32", device: str = "cpu") -> str:
    with pytest.raises(EngineError) as refused:
        models.load(str(folder), dtype, device)
    line = str(refused.value)
    assert "\n" not in line
    assert len(line) - len(str(folder)) < 400
    return line


SIZES = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}


def test_a_directory_without_a_config_is_refused(tmp_path):
    assert "no config.json there" in refusal(tmp_path / "nowhere")
    assert "no config.json there" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{ not json", "its config.json cannot be read"),
        (b"\xff\xfe\x00", "its config.json cannot be read"),
        (b"[1]", "holds no object"),
        (b"{}", "without a named architecture is not supported"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(tmp_path, content, complaint):
    (tmp_path / "config.json").write_bytes(content)
    assert complaint in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported; supported are Gemma"),
        ({"architectures": "LlamaForCausalLM"}, "without a named architecture"),
        ({"architectures": [7]}, "7 is not supported"),
        ({"architectures": [["x"]]}, "['x'] is not supported"),
        ({"model_type": "nosuch"}, "model type `nosuch`"),
        ({"num_hidden_layers": "two"}, "'num_hidden_layers' expected int, got str"),
        ({"hidden_size": -64}, "config.json: hidden_size: got -64, expected at least 1"),
        *(({key: 0}, f"config.json: {key}: got 0, expected at least 1") for key in SIZES),
        ({"max_position_embeddings": -1}, "config.json: max_position_embeddings: got -1, expected at least 1"),
        ({"sliding_window": 0, "use_sliding_window": True}, "config.json: sliding_window: got 0, expected an integer"),
        ({"sliding_window": "x"}, 'config.json: sliding_window: got "x", expected an integer from 1 on'),
        ({"pad_token_id": 600}, "config.json: pad_token_id: got 600, expected less than vocab_size, 512"),
        ({"dtype": "x"}, 'config.json: dtype: got "x", expected one such as float32'),
        ({"dtype": []}, "config.json: dtype: got [], expected one such as float32"),
        ({"hidden_act": "x"}, 'config.json: hidden_act: got "x", expected one such as silu'),
        ({"rope_parameters": {"rope_type": ["a"], "rope_theta": 1e4}}, "rope_type ['a'] is not supported"),
        (
            {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor: got 0.5, expected none",
        ),
        ({"rope_parameters": LONGROPE}, "rope_type longrope is not supported; supported are default, linear"),
        ({"rope_parameters": None, "rope_scaling": LONGROPE}, "rope_type longrope is not supported"),
        ({"is_causal": False}, "attention to later tokens is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights are not supported"),
        ({"num_hidden_layers": 3}, "missing keys in its weights: model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "unexpected keys in its weights: model.layers.1.input_layernorm.weight"),
        ({"intermediate_size": 96}, "mismatched keys in its weights: model.layers.0.mlp.down_proj.weight"),
    ],
    ids=str,
)
def test_a_config_that_is_of_no_model_here_is_refused_by_name(tmp_path, capfd, changes, complaint):
    config = save_tiny("llama", tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    assert complaint in refusal(tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: got 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: got 0"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, "layer_types: chunked_attention is not supported"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "sliding_window: expected an integer, as layer_types"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "attention to later tokens is not supported"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {"rope_theta": 10000.0}}},
            "rope_type longrope is not supported",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_only_some_families_have_is_refused_by_name_too(tmp_path, family, changes, complaint):
    config = save_tiny(family, tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    assert complaint in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "its generation_config.json cannot be read"),
        ("[]", "its generation_config.json holds no object"),
        ('{"eos_token_id": 3.5}', "generation_config.json: eos_token_id: got 3.5, expected an integer or a list of"),
        ('{"eos_token_id": "x"}', 'generation_config.json: eos_token_id: got "x"'),
        ('{"eos_token_id": [1, "x"]}', 'generation_config.json: eos_token_id: got [1, "x"]'),
        ('{"max_new_tokens": "x"}', "its generation_config.json cannot be used"),
    ],
)
def test_what_ends_an_answer_is_read_or_the_directory_refused(tmp_path, content, complaint):
    (save_tiny("llama", tmp_path) / "generation_config.json").write_text(content)
    assert complaint in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "its model.safetensors.index.json cannot be read"),
        ("{}", "model.safetensors.index.json: weight_map: expected the name of a file for each tensor"),
        ('{"weight_map": {"a": 7}}', "model.safetensors.index.json: weight_map: expected the name of a file"),
        ('{"weight_map": {}, "metadata": {}}', "model.safetensors.index.json: weight_map: expected the name of a file"),
        ('{"weight_map": {"a": "b"}}', "model.safetensors.index.json: metadata: expected an object"),
    ],
)
def test_an_index_that_names_no_files_is_refused(tmp_path, content, complaint):
    (save_tiny("llama", tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert complaint in refusal(tmp_path)


def change_weights(folder, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_a_missing_tensor_is_named(tmp_path):
    change_weights(save_tiny("llama", tmp_path), lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    assert "missing keys in its weights: model.layers.1.mlp.up_proj.weight; 1 in all" in refusal(tmp_path)


def test_an_extra_tensor_is_named(tmp_path):
    change_weights(save_tiny("llama", tmp_path), lambda weights: weights.update(whatfor=torch.ones(2)))
    assert "unexpected keys in its weights: whatfor; 1 in all" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn], ids=str)
def test_weights_of_another_kind_than_numbers_with_a_point_are_not_converted(tmp_path, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(save_tiny("llama", tmp_path), lambda weights: weights.update({name: weights[name].to(dtype)}))
    said = {torch.int32: "I32", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3"}[dtype]
    assert f"{name}: weights of type {said} are not supported" in refusal(tmp_path)


def test_only_weights_that_are_loaded_are_looked_at(tmp_path):
    save_file({"step": torch.zeros(1, dtype=torch.int64)}, save_tiny("llama", tmp_path) / "optimizer.safetensors")
    assert models.load(str(tmp_path), "float32", "cpu").num_layers == 2


SAVED_BY_OTHERS = {
    "use_mrope": False,
    "max_window_layers": 21,
    "unsloth_version": "2025.1",
    "cache_implementation": "hybrid",
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "rope_parameters": {"type": "default", "rope_type": "default", "rope_theta": 10000.0},
    "transformers_version": "4.40.0",
}


@pytest.mark.parametrize("key", SAVED_BY_OTHERS)
def test_a_config_that_somebody_else_saved_is_of_the_same_model(tmp_path, key):
    path = save_tiny("qwen2", tmp_path) / "config.json"
    ours = model_config.load_config(str(tmp_path))
    path.write_text(json.dumps({**json.loads(path.read_text()), key: SAVED_BY_OTHERS[key]}))
    assert not model_config.why_another(ours, model_config.load_config(str(tmp_path)))


@pytest.mark.parametrize("content", [b"junk" * 1000, b""], ids=["junk", "empty"])
def test_weights_that_cannot_be_read_are_refused(tmp_path, content):
    (save_tiny("llama", tmp_path) / "model.safetensors").write_bytes(content)
    assert "its weights cannot be loaded" in refusal(tmp_path)


def test_a_directory_without_weights_is_refused_and_pickled_ones_are_not_looked_at(tmp_path):
    (save_tiny("llama", tmp_path) / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "no file named model.safetensors" in refusal(tmp_path)


def test_a_device_that_is_not_there_is_refused(whole):
    assert "device nonsense cannot be used" in refusal(whole, device="nonsense")
    assert "device meta cannot be used: expected cpu, cuda or auto" in refusal(whole, device="meta")
    if not torch.cuda.is_available():
        assert "device cuda cannot be used" in refusal(whole, device="cuda")


# On a GPU


def why_not(folder, *, dtype: str = "bfloat16", block_tokens: int = 16, **facts: Any) -> str:
    loaded = models.load(str(folder), dtype, "cpu")
    facts = {"batch_invariant": False, "capability": (9, 0), "has_windows": True, **facts}
    return models.why_not_on_gpu(loaded, block_tokens, **facts)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gemma2"}), indirect=True)
def test_a_gpu_runs_every_family_but_one(family):
    assert why_not(family.folder) == ""


def test_what_a_gpu_cannot_run_is_refused_by_name(tmp_path):
    llama, windows, experts = (save_tiny(name, tmp_path / name) for name in ("llama", "mistral", "mixtral"))
    assert "attn_logit_softcapping" in why_not(save_tiny("gemma2", tmp_path / "gemma2"))
    for head_dim in (8, 80, 96):
        folder = save_tiny("qwen3", tmp_path / str(head_dim), head_dim=head_dim)
        assert f"head_dim: got {head_dim}" in why_not(folder)
    for block_tokens in (8, 24):
        assert f"block_tokens: got {block_tokens}" in why_not(llama, block_tokens=block_tokens)
    turning = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    assert "rope_type dynamic" in why_not(save_tiny("llama", tmp_path / "dynamic", rope_parameters=turning))
    assert "sliding windows" in why_not(windows, has_windows=False)
    assert not why_not(windows, has_windows=False, dtype="float32")
    assert not why_not(llama, has_windows=False, capability=(8, 0), batch_invariant=True)
    assert "bfloat16" in why_not(experts, dtype="float32")
    assert "9.0" in why_not(experts, capability=(8, 0))
    assert "batch_invariant" in why_not(experts, batch_invariant=True)
