"""The state that a run keeps on disk: checkpoints, the redo log of steps, and when each is written."""
