"""Evaluation of the newest weights in a separate process, while training continues."""
