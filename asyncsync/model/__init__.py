"""The weights in a model: the selection and strategy, the binding to a model, prepared updates, and the gate."""
