"""A rollout: how a collector steps its environment, and where the steps go."""
