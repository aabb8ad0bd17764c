"""Environments as a collector takes them."""
