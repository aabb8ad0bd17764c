"""A rollout: how a collector steps its environment, and how the steps become a batch."""
