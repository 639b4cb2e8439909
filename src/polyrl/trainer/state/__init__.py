"""What a run keeps on disk: checkpoints, the log of steps that can be trained again, and when each is written."""
