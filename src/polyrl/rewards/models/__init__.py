"""The parts of a reward model: docs/guides/judge.md."""
