"""Engines, which generate inside a worker: the contract, and one module per engine."""
