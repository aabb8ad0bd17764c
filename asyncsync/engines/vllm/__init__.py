"""vLLM follows a trainer. If asyncsync is installed, vLLM has another backend for weight transfer::

    vllm serve MODEL --weight-transfer-config '{"backend": "asyncsync"}'

vLLM imports this module in each of its processes, through the entry point in the group ``vllm.general_plugins``. So it
imports nothing heavy. ``engine`` has the receiving side. ``trainer`` has the sending side, for frameworks that use
vLLM's classes.
"""

from __future__ import annotations

import logging

BACKEND = "asyncsync"


def weight_version(epoch: str, version: int) -> str:
    """vLLM's name for this version: ``finish_weight_update(weight_version=…)``."""
    return f"{epoch}:{version}"


def register() -> None:
    """Add the backend to vLLM's registries. vLLM does not catch what this raises, so it only warns of problems."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

        for factory, module, name in (
            (WeightTransferEngineFactory, "engine", "AsyncSyncWeightTransferEngine"),
            (WeightTransferTrainerFactory, "trainer", "AsyncSyncTrainerWeightTransferEngine"),
        ):
            try:
                factory.register_engine(BACKEND, f"{__name__}.{module}", name)
            except ValueError:
                pass  # vLLM has called this before
    except Exception as error:
        logging.getLogger("asyncsync").warning(
            "asyncsync is not available as a backend for weight transfer in this vLLM, because its registry is not "
            "that of vLLM 0.28 and later: %s: %s",
            type(error).__name__,
            error,
        )
