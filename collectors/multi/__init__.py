"""Collectors whose environments are stepped by several workers."""
