"""Inference engines that follow a trainer: a switch of versions that is all or nothing, and goes back when it fails.

Each engine has a package of its own, which says how the engine is told to use it. They use what asyncsync.sync offers.
"""
