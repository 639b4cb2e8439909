"""The tokenizer of characters: what transformers reads from its files is what we encode ourselves."""

import json

from transformers import AutoTokenizer

from polyrl.data import characters
from polyrl.data.arithmetic import Problem


def test_a_problem_and_its_solution_come_back_as_they_were():
    text = Problem((3, 12, 4)).prompt + Problem((3, 12, 4)).solution
    assert characters.decode(characters.encode(text)) == text


def test_marks_and_foreign_ids_are_no_text():
    assert characters.decode([characters.PAD_ID, characters.END_ID, characters.UNKNOWN_ID, 999]) == ""
    assert characters.encode("a?") == [characters.encode("a")[0], characters.UNKNOWN_ID]


def test_ids_are_where_they_were_when_models_were_made():
    assert characters.encode("09=az") == [3, 12, 13, 14, 39]
    assert (characters.PAD_ID, characters.END_ID, len(characters.VOCABULARY)) == (0, 1, 40)


def test_transformers_reads_the_files_as_we_do(tmp_path):
    characters.save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "a3b5c4=b5=8c4=12"
    assert tokenizer(text)["input_ids"] == characters.encode(text)
    assert tokenizer.decode([*characters.encode(text), characters.END_ID], skip_special_tokens=True) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (characters.END_ID, characters.PAD_ID)
    assert tokenizer("a ?")["input_ids"] == characters.encode("a ?")
