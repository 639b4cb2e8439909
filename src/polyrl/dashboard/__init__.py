"""A run in the browser: what it does now, what the model said and why it was paid, who did what when, what it cost."""
