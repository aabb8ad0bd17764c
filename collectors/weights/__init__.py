"""A collector's weights: where they come from, and to whom they are passed on."""
