"""Collectors: environments stepped in parallel by workers whose policy follows the trainer."""
