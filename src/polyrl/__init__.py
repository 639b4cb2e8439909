"""PolyRL: RL post-training for language models that you can pull the plug on."""

__version__ = "0.1.0"
