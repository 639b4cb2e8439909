"""Frames that workers and the trainer send, taken in: each becomes an event for the scheduler, or is refused."""
