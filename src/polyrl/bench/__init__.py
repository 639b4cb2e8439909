"""Measurements of PolyRL on this machine: the scheduler, the builtin engine, the trainer, weight transfers."""
