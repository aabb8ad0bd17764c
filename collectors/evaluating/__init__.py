"""Evaluation of the newest weights, in a process of its own, while training goes on."""
