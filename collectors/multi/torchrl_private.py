"""Private names of TorchRL that this package uses. The test of private names says what breaks without them."""

from __future__ import annotations

import sys
from typing import Any

from torch import multiprocessing


def share_lazy_storage(replay_buffer: Any) -> None:
    """Let the first process that writes to one of TorchRL's replay buffers make its lazy storage for all processes, as
    with ``shared_init=True``. TorchRL's collectors do the same."""
    data = sys.modules.get("torchrl.data")
    if data is None or not isinstance(replay_buffer, data.ReplayBuffer):
        return
    storage = replay_buffer.storage
    is_lazy = isinstance(storage, data.LazyTensorStorage) and hasattr(storage, "_make_init_directory")
    if is_lazy and not (storage.initialized or storage.shared_init):
        storage.shared_init = True
        storage._init_lock, storage._init_event = multiprocessing.Lock(), multiprocessing.Event()
        storage._make_init_directory()
