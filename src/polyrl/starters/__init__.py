"""Small models to start reinforcement learning from."""
