"""The builtin engine: any standard Hugging Face causal language model, with no inference server."""
