"""The private name of Gymnasium that is touched here; tests/unit/test_private_names.py says what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def reset_these(env: Any, finished: np.ndarray[Any, Any]) -> Iterator[tuple[int, Any]]:
    """Reset environments of a ``SyncVectorEnv`` that waits for that (``AutoresetMode.DISABLED``): those of a mask, bool
    ``[num_envs]``. Their indices, and first observations."""
    env._autoreset_envs[finished] = False  # else its next step refuses
    for index in np.flatnonzero(finished).tolist():
        yield index, env.envs[index].reset()[0]
