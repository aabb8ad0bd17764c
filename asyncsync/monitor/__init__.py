"""What a bus tells of itself: metrics, and each version's life as debug lines and as spans.

options.py   what a bus is asked to tell
metrics.py   figures for Prometheus, served over HTTP
tracing.py   OpenTelemetry, where it is there
sender.py    the life of a version at the sender
receiver.py  the same at a receiver
"""
