"""Small models to start from: one made for the arithmetic task, and SmolLM2 from its wheel."""
