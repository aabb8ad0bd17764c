"""A collector's weights: how it receives them, applies them and sends them on."""
