"""What `polyrl train` puts together: processes, the trainer's own worker, weights, rewards, and what is told."""
