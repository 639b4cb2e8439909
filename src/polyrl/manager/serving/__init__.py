"""The OpenAI-compatible side of the manager: docs/guides/serve.md."""
