"""Jobs of post-training: preference training, reward models and reinforcement learning by TRL's trainers, under a plan."""
