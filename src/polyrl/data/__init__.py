"""Data: where prompts come from, what the model sees of them, and the arithmetic task that is generated here."""
