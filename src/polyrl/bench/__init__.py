"""Measurements of PolyRL on this machine: scheduler, builtin engine, trainer, weight transfers, episodes."""
