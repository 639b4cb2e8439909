"""A run in the browser: its state, its answers with their rewards, a timeline of workers, and its cost."""
