"""The weight-synchronisation schemes. Each backend has a class ``…Core``, derived from ``scheme.Scheme``. The class for
users adds an API to it: that of ``aio``, or in :mod:`asyncsync.sync` that of ``blocking``."""
