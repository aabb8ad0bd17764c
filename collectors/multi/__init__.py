"""Collectors whose environments are stepped by several workers."""

from __future__ import annotations

from asyncsync.collectors.multi.collector import MultiCollector
from asyncsync.collectors.multi.multi_async import MultiAsyncCollector
from asyncsync.collectors.multi.multi_sync import MultiSyncCollector

__all__ = ["MultiAsyncCollector", "MultiCollector", "MultiSyncCollector"]

MultiCollector.kinds.update({True: MultiSyncCollector, False: MultiAsyncCollector})
