"""The parts of a judge that scores answers: docs/guides/judge.md."""
