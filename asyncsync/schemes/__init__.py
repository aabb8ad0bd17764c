"""The weight-synchronisation schemes. ``scheme`` is their base. Each backend has a class ``…Core``, to which ``aio`` adds
the asyncio API, and ``blocking``, in :mod:`asyncsync.sync`, the blocking API."""
