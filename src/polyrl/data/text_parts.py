"""The tokenizer and chat template of a model's directory, for text that is served. Nothing is downloaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.data.chat_template import ChatTemplate


def load_text_parts(folder: Path) -> "tuple[Any, ChatTemplate | None]":
    """Return the tokenizer, which neither cuts nor pads, and the template if there is one. Raises UserError."""
    try:
        from tokenizers import Tokenizer

        from polyrl.data.chat_template import load_template
    except ImportError as error:
        raise UserError(f"text needs {error.name}: pip install 'polyrl[serve]'") from error
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{folder}: no tokenizer.json there; expected a Hugging Face model directory")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{file}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, load_template(folder)
