"""What generates inside a worker: the contract, and one module an engine."""
