"""The commands of ``asyncsync``: each module adds its own, and runs it."""
