"""The weights in a model: strategies, where a model keeps its tensors, updates that are prepared, and the gate."""
