"""The pure heart: facts in, wishes out. No clock, no I/O, no randomness, no threads."""
