"""Data: where prompts come from, what they look like to the model, and the task that is generated here."""
