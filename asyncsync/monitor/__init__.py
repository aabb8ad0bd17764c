"""What a bus tells about itself: events in the life of each version (``trace``), which become debug lines and spans of
OpenTelemetry, and figures for Prometheus (``metrics``). The bus calls this package; nothing here changes what the bus
does.
"""
