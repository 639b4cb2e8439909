"""A model's directory without weights, for pages that show text."""

import json
from pathlib import Path


def character_model(folder: Path) -> Path:
    """A tokenizer whose tokens are characters, so that answers can be any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    vocabulary = {chr(code): code for code in range(0x2100)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    facts = {"model_type": "llama", "vocab_size": 0x2100, "max_position_embeddings": 4096, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder
