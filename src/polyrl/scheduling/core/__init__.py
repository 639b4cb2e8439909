"""The vocabulary and the state of the scheduler: events, commands, parameters, samples, workers, the ledger."""
