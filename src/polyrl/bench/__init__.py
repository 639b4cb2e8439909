"""What PolyRL does on this machine, measured: the scheduler, the builtin engine, the trainer, weight transfers."""
