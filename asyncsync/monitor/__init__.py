"""Monitoring of a bus: ``trace`` makes debug lines and OpenTelemetry spans of the events of each version; ``metrics``
serves metrics to Prometheus. The bus calls this package; nothing here changes what the bus does.
"""
