"""vLLM follows a trainer. Where asyncsync is installed, vLLM has one more backend for weight transfer::

    vllm serve MODEL --weight-transfer-config '{"backend": "asyncsync"}'

vLLM imports this module in each of its processes, because of the entry point in the group ``vllm.general_plugins``: so
it imports nothing heavy. ``engine`` has the receiving side, ``trainer`` the sending one, for frameworks that call
vLLM's.
"""

from __future__ import annotations

import logging

BACKEND = "asyncsync"


def weight_version(epoch: str, version: int) -> str:
    """By what name vLLM knows this version: ``finish_weight_update(weight_version=…)``."""
    return f"{epoch}:{version}"


def register() -> None:
    """Add the backend to vLLM's registries. vLLM calls this without a guard: whatever is wrong is a warning."""
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
            "asyncsync is no backend for weight transfer in this vLLM, whose registry is not the one of vLLM 0.28 and "
            "later: %s: %s",
            type(error).__name__,
            error,
        )
