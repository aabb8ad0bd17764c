"""The steady state of a training loop in few steps, beside the state machines."""
