"""Texts to tokens and back, with tokenizers as they lie beside models."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from polyrl.data.characters import save_tokenizer
from polyrl.data.rows import DataError
from polyrl.data.tokens import ModelTokenizer, answer_decoder
from polyrl.errors import ConfigError

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}={% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def make(folder: Path, *, config: dict[str, object] | None = None, template: str | None = None) -> ModelTokenizer:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    save_tokenizer(folder)
    if template is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return ModelTokenizer(str(folder))


def test_tokens_read_back_as_the_text_they_came_from(tmp_path: Path):
    tokenizer = make(tmp_path)
    first, second = tokenizer.tokens(["1a2=", "b"])
    assert len(first) == 4 and len(second) == 1 and first.dtype.name == "int32"
    assert tokenizer.text(first.tolist()) == "1a2="


def test_an_answer_is_read_without_the_tokens_that_end_it(tmp_path: Path):
    tokenizer = make(tmp_path, config={"model_type": "llama", "eos_token_id": [1, 0]})
    answer = tokenizer.tokens(["12"])[0].tolist()
    assert tokenizer.text([*answer, 1]) == "12"
    assert tokenizer.text([*answer, 0, 1]) == "12"
    assert tokenizer.text([1]) == ""


def test_a_chat_is_written_by_the_tokenizers_template_up_to_the_answer(tmp_path: Path):
    tokenizer = make(tmp_path, template=TEMPLATE)
    chat = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
    assert tokenizer.written(chat) == "s1=u2=a"
    chat_tokens, plain_tokens = tokenizer.tokens([chat, "s1=u2=a"])
    assert chat_tokens.tolist() == plain_tokens.tolist()


def test_a_chat_without_a_template_is_told_so(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.path: .* has no chat template"):
        make(tmp_path).tokens([[{"role": "user", "content": "2"}]])


def test_what_a_template_refuses_is_one_line(tmp_path: Path):
    tokenizer = make(tmp_path, template="{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(DataError, match="refuses the messages: roles must alternate"):
        tokenizer.written([{"role": "user", "content": "2"}])


def test_the_context_is_what_the_model_says(tmp_path: Path):
    assert make(tmp_path, config={"model_type": "llama", "max_position_embeddings": 77}).max_context == 77
    assert make(tmp_path).max_context is None


def test_a_tokenizer_of_another_model_is_one_line(tmp_path: Path):
    largest = int(make(tmp_path).tokens(["1a2="])[0].max())
    make(tmp_path, config={"model_type": "llama", "vocab_size": largest + 1}).tokens(["1a2="])
    tokenizer = make(tmp_path, config={"model_type": "llama", "vocab_size": largest})
    with pytest.raises(ConfigError, match=rf"does not match the model: it writes token {largest}, .* {largest}$"):
        tokenizer.tokens(["1a2="])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json there"),
        ({"config.json": "{}"}, "no tokenizer there"),
        ({"config.json": '{"model_type": "llama"}', "tokenizer.json": "nonsense"}, "its tokenizer cannot be used"),
    ],
)
def test_a_directory_without_a_tokenizer_is_one_line_with_its_key(tmp_path: Path, files: dict[str, str], message: str):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"model\.path: .*{message}") as wrong:
        ModelTokenizer(str(tmp_path))
    assert "\n" not in str(wrong.value)


def test_the_template_hears_what_the_recipe_tells_it(tmp_path: Path):
    tokenizer = make(
        tmp_path, template=TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}=1{% endif %}"
    )
    chat = [{"role": "user", "content": "2"}]
    assert tokenizer.written(chat) == "u2=a"
    assert tokenizer.written(chat, {"enable_thinking": False}) == "u2=a=1"
    assert len(tokenizer.tokens([chat], {"enable_thinking": False})[0]) == len(tokenizer.tokens([chat])[0]) + 2


def test_an_answers_text_is_what_transformers_makes_of_its_tokens(tmp_path: Path):
    ours = make(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    draws = random.Random(5)
    for _ in range(50):
        tokens = [draws.randrange(len(theirs)) for _ in range(draws.randrange(1, 20))]
        while tokens and tokens[-1] == theirs.eos_token_id:
            tokens.pop()
        assert ours.text(tokens) == theirs.decode(tokens, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", ["characters", "bytes", "pieces"])
@pytest.mark.parametrize("config", [{}, {"eos_token_id": [2, 3]}], ids=["", "ends"])
def test_readers_get_the_same_text_without_transformers(kind: str, config: dict[str, object], tmp_path: Path):
    ours = make(tmp_path, config={"model_type": "llama", **config})
    if kind != "characters":
        write_bpe(tmp_path, of_bytes=kind == "bytes")
        ours = ModelTokenizer(str(tmp_path))
    text_of = answer_decoder(str(tmp_path))
    draws = random.Random(6)
    for _ in range(200):
        tokens = [draws.randrange(12) for _ in range(draws.randrange(12))]
        assert text_of(tokens) == ours.text(tokens), tokens


def write_bpe(folder: Path, *, of_bytes: bool) -> None:
    """Write a tokenizer of few pieces, as GPT-2's (bytes) and Llama's (pieces with spaces, and bytes) are made."""
    pieces = (
        ["\u0120a", "b", "\u00e2", "\u0124", "\u00ac"] if of_bytes else ["\u2581a", "b", "<0xE2>", "<0x82>", "<0xAC>"]
    )
    more = ["c", "1", "2", "3"]
    vocabulary = {piece: place for place, piece in enumerate(["<pad>", "<unknown>", "<end>", *pieces, *more])}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unknown>", byte_fallback=not of_bytes))
    written_out = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.ByteLevel() if of_bytes else decoders.Sequence(written_out)
    made.add_special_tokens(["<pad>", "<unknown>", "<end>"])
    made.save(str(folder / "tokenizer.json"))


def test_tokens_that_only_transformers_knows_are_read_with_it(tmp_path: Path):
    make(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    number = len(AutoTokenizer.from_pretrained(tmp_path))
    added = {str(number): {"content": "<tool>", "special": True}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens_decoder": added}))
    assert answer_decoder(str(tmp_path))([number]) == ModelTokenizer(str(tmp_path)).text([number]) == "<tool>"


def test_a_reader_of_answers_imports_no_transformers(tmp_path: Path):
    make(tmp_path)
    says = f"import sys; from polyrl.data.tokens import answer_decoder; answer_decoder({str(tmp_path)!r})([5])"
    subprocess.run([sys.executable, "-c", f"{says}; assert 'transformers' not in sys.modules"], check=True)
