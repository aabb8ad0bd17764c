"""The private name of TorchRL that is touched here; the test of private names says what breaks without it."""

from __future__ import annotations

import sys
from typing import Any


def let_workers_begin(replay_buffer: Any) -> None:
    """Have the processes that share one of TorchRL's replay buffers make its lazy storage with the first frames, as
    ``shared_init=True`` does, and as TorchRL's collectors see to."""
    data = sys.modules.get("torchrl.data")
    if data is None or not isinstance(replay_buffer, data.ReplayBuffer):
        return
    from torchrl.collectors import _multi_base

    storage = replay_buffer.storage
    begin = getattr(_multi_base.MultiCollector, "_enable_replay_buffer_worker_init", None)  # since TorchRL 0.14
    if begin is not None and isinstance(storage, data.LazyTensorStorage) and not storage.initialized:
        begin(storage)
