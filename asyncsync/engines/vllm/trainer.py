"""The sending side, for frameworks that use vLLM's ``WeightTransferTrainerFactory.trainer_init`` and ``send_weights``.

Usage::

    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory
    from asyncsync.engines.vllm.trainer import AsyncSyncTrainerInitInfo

    trainer = WeightTransferTrainerFactory.trainer_init(
        AsyncSyncTrainerInitInfo(rank=0), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    trainer.send_weights()              # between the caller's pause and resume, if there is one

Your own framework does not need this module: it can publish on a scheme, and call vLLM's routes with
:class:`~asyncsync.engines.vllm.info.UpdateInfo`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from asyncsync.engines.vllm import BACKEND, weight_version
from asyncsync.engines.vllm.info import InitInfo
from asyncsync.errors import NotConnected
from asyncsync.sync import WeightSyncScheme

REPORT_SECONDS = 5.0  # to wait for the workers' reports of failures


@dataclass
class AsyncSyncTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM need not be here for mypy
    """How the trainer and its replicas meet.

    Attributes:
        rank: of this trainer process; rank 0 sends.
        endpoint: where the sender binds, ``ipc:///path`` or ``tcp://HOST:PORT``; None draws a private ipc path.
        connect: where the replicas connect, if that differs.
        scheme, model_id, first_worker, timeout: as in :class:`~asyncsync.engines.vllm.info.InitInfo`.
        server_key, clients: on the sender's host, the path of its secret certificate, and the directory of the
            replicas' public certificates.
        replica_server_key, replica_client_key: the paths of the certificates on the replicas' hosts.
    """

    backend: ClassVar[str] = BACKEND
    endpoint: str | None = None
    connect: str | None = None
    scheme: str = "shared"
    model_id: str = "policy"
    first_worker: int | None = None
    timeout: float = 60.0
    server_key: str | None = None
    clients: str | None = None
    replica_server_key: str | None = None
    replica_client_key: str | None = None


class AsyncSyncTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Publishes the weights of a ``WeightSource``, and has the replicas load them when all bytes have arrived.

    Attributes:
        scheme: the sender, on rank 0; None on the other ranks.
    """

    init_info_cls = AsyncSyncTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, scheme: WeightSyncScheme | None, timeout: float) -> None:
        super().__init__(client=client, source=source, is_sender=scheme is not None)
        self.scheme = scheme
        self._timeout = timeout

    @classmethod
    def trainer_init(cls, init_info: AsyncSyncTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Open the sender, and connect the replicas. Call it on every rank of the trainer.

        Raises:
            ValueError: there is no source, or a field is wrong.
            Exception: raised by the client if a replica cannot be connected.
        """
        if source is None:
            raise ValueError("asyncsync sends a WeightSource's weights: pass source=ModuleSource(model), or your own")
        if not init_info.is_sender:
            return cls(client=client, source=source, scheme=None, timeout=init_info.timeout)
        given = {"server_key": init_info.server_key, "clients": init_info.clients, "connect": init_info.connect}
        options = {name: value for name, value in given.items() if value is not None}
        scheme = WeightSyncScheme.from_backend(
            init_info.scheme, endpoint=init_info.endpoint, strategy="state_dict", min_workers=0, **options
        )
        scheme.init_on_sender(model_id=init_info.model_id)
        try:
            scheme.connect(timeout=init_info.timeout)
            info = {
                "endpoint": scheme.bus.connect_endpoint,
                "scheme": init_info.scheme,
                "model_id": init_info.model_id,
                "first_worker": init_info.first_worker,
                "timeout": init_info.timeout,
                "server_key": init_info.replica_server_key,
                "client_key": init_info.replica_client_key,
            }
            InitInfo.given(info)  # name wrong fields here, before each rank of each replica does
            client.init_weight_transfer_engine(info)
        except BaseException:
            scheme.shutdown()
            raise
        return cls(client=client, source=source, scheme=scheme, timeout=init_info.timeout)

    def send_weights(self) -> None:
        """Send the source's current weights, and have the replicas load them. Call it on every rank of the trainer.

        Raises:
            PartialSendError: a replica has not loaded them, and serves the version before; with its ranks' tracebacks.
            Exception: raised by the client, if no rank has reported a failure.
        """
        scheme, weights = self.scheme, {}
        for name, tensor in self.source:  # on all ranks, because it may be a collective
            if scheme is not None:
                weights[name] = tensor.detach().to("cpu")  # one by one, so that the device needs room for one
        if scheme is None:
            return
        version = scheme.publish(weights)
        deadline = time.monotonic() + self._timeout
        scheme.wait_staged(version, timeout=self._timeout)
        self.client.start_weight_update()
        try:
            left = max(1.0, deadline - time.monotonic())
            self.client.update_weights({"version": version, "epoch": scheme.epoch, "timeout": left})
        except Exception as error:
            with suppress(Exception):  # the rank that raised refuses this, but vLLM's other ranks need it
                self.client.finish_weight_update()
            with suppress(NotConnected):  # the replica is gone, and the client's error says more
                scheme.wait_version(version, timeout=REPORT_SECONDS)
            raise error
        self.client.finish_weight_update(weight_version(scheme.epoch, version))
        scheme.wait_version(version, timeout=max(REPORT_SECONDS, deadline - time.monotonic()))

    def shutdown(self) -> None:
        """Close the sender. The replicas go on serving their weights."""
        if self.scheme is not None:
            self.scheme.shutdown()
