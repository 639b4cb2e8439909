"""A scenario with a real manager, real worker processes and emulated engines, at a scaled clock."""
