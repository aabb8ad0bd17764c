"""The receiving side: one engine in each rank's process, which vLLM calls in its own thread.

Each rank is a receiver of its own. An update is one call, ``update_weights``: the rank takes the version, loads it
while it is lent, and votes. If all ranks have loaded it, each acknowledges it. Otherwise each goes back to the version
before, which is lent, too, and reports why. The sender gets the traceback of the rank that has failed.

Much of the rest follows from what vLLM 0.32 does:

- If a rank raises, vLLM's executor stops reading answers there, and takes the answers of later ranks for answers to the
  next call. So only the last rank raises, with the reasons of all ranks. For the same reason, arguments are checked
  inside the call.
- The ranks that have not raised are still in the update for vLLM, until ``finish_weight_update`` is called.
- ``start_weight_update`` does nothing here, because vLLM may use the model between it and ``update_weights``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from asyncsync.engines.vllm import weight_version
from asyncsync.engines.vllm.info import InitInfo, UpdateInfo
from asyncsync.engines.vllm.ranks import MARGIN, Ranks
from asyncsync.net.keys import KeyFiles
from asyncsync.net.processes import this_process
from asyncsync.relay.process import EmbeddedRelay
from asyncsync.sync import WeightSyncScheme

logger = logging.getLogger("asyncsync")

FILES = "the model's own files"  # a replica that has loaded no version serves these
CATCH_UPS = 3  # if a starting replica fails to load the newest version, it tries newer ones; this many in all


class UpdateFailed(RuntimeError):
    """A version was not loaded. The message says why, for each rank, and which version the ranks serve now."""


class EngineLost(RuntimeError):
    """A rank's model is neither the new version nor the one before."""


class AsyncSyncWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM need not be here for mypy
    """Loads the versions of an asyncsync sender into vLLM's model. vLLM makes it, and calls its methods."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        world = get_world_group()
        store = world.cpu_group.get_group_store().clone() if world.world_size > 1 else None
        self._ranks = Ranks(store, world.rank_in_group, world.world_size)
        self._scheme: WeightSyncScheme | None = None
        self._relay: EmbeddedRelay | None = None
        self._info: InitInfo | None = None
        self._serves = FILES  # or the weight_version of the version that was loaded last

    # -- what vLLM calls -----------------------------------------------------------------------------------------------

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Return it unchecked, because all ranks would raise; :meth:`init_transfer_engine` checks it."""
        return init_dict

    def init_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Connect to the sender, and load its version. Keep connections that all ranks have made with this info."""
        self._ranks.begin()
        started, info, problem = time.monotonic(), None, ""
        seconds = InitInfo.timeout
        try:
            info = InitInfo.given(init_info)
            seconds = info.timeout
        except ValueError as error:
            problem = _text(error)
        deadline = started + seconds + MARGIN
        is_kept, relay = self._agree_on_connection(info, deadline)  # on all ranks, because exchanges are numbered
        if info is not None:
            try:
                self._connect(info, relay, is_kept)
            except Exception as error:
                problem = _text(error)
                logger.exception("asyncsync: rank %d cannot be connected", self._ranks.rank)
        problems = self._ranks.vote(problem, deadline)
        if problems:
            self._raise_on_last_rank(f"not connected to the sender: {_listed(problems)}")
            return
        with set_current_vllm_config(self.vllm_config):
            self._catch_up(seconds)

    def start_weight_update(self) -> None:
        """Do nothing: :meth:`update_weights` does everything."""

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Load a version on all ranks, or go back to the one before on all; then the last one raises UpdateFailed.

        vLLM's own method would call torch.accelerator.synchronize(), which raises on a machine without an accelerator.
        """
        self._ranks.begin()
        if failure := self._update(update_info):
            self._raise_on_last_rank(failure)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Never called: the vote in :meth:`update_weights` must cover what vLLM would do before and after this."""
        raise NotImplementedError("update_weights() loads the weights")

    def finish_weight_update(self) -> None:
        """Do nothing: :meth:`update_weights` does everything."""

    def shutdown(self) -> None:
        """Leave the sender. The model keeps its weights."""
        scheme, self._scheme, self._info = self._scheme, None, None
        relay, self._relay = self._relay, None
        if scheme is not None:
            scheme.shutdown()
        if relay is not None:
            relay.close()

    # -- connecting ----------------------------------------------------------------------------------------------------

    def _agree_on_connection(self, info: InitInfo | None, deadline: float) -> tuple[bool, str]:
        """Returns whether all ranks keep their connections, and the address of this host's relay, or ``""``.

        With scheme "zmq" or "auto", the first of several ranks on a host opens a relay, which receives into shared
        memory for all of them, unless each rank has a key of its own. With "shared", they read the sender's memory.
        """
        here = this_process()
        is_kept = self._scheme is not None and not self._scheme.closed and info == self._info
        own = {"host": f"{here.boot} {here.namespace}", "kept": is_kept}
        states = {rank: json.loads(text) for rank, text in self._ranks.exchange(json.dumps(own), deadline).items()}
        is_kept = len(states) == self._ranks.size and all(state["kept"] for state in states.values())
        same_host = sorted(rank for rank, state in states.items() if state["host"] == own["host"])
        if info is not None and not is_kept:
            self.shutdown()
            use_relay = info.scheme != "shared" and not info.has_key_per_worker and len(same_host) > 1
            if use_relay and same_host[0] == self._ranks.rank:
                try:
                    self._relay = EmbeddedRelay(info.endpoint, KeyFiles.given(info.server_key, None, info.client_key))
                except Exception:
                    logger.exception("asyncsync: rank %d cannot open a relay: each rank connects itself", same_host[0])
        relays = self._ranks.exchange("" if self._relay is None else self._relay.endpoint, deadline)
        return is_kept, relays.get(same_host[0], "") if same_host else ""

    def _connect(self, info: InitInfo, relay: str, is_kept: bool) -> None:
        if not is_kept:
            parallel, place = self.parallel_config, {"anonymous": True}
            if info.first_worker is not None:
                rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
                place = {"worker_idx": info.first_worker + rank}
            if relay:
                scheme = WeightSyncScheme.from_backend("shared", connect=relay)
            else:
                scheme = WeightSyncScheme.from_backend(info.scheme, **info.options())
            scheme.init_on_receiver(info.model_id, apply="on_take", reconnect=True, **place)
            self._scheme, self._info = scheme, info
        assert self._scheme is not None
        try:
            self._scheme.connect(timeout=info.timeout)  # also if it is connected, to learn the sender's newest version
        except BaseException:
            if not is_kept:
                self.shutdown()
            raise

    def _catch_up(self, seconds: float) -> None:
        """Load the newest version, if the sender has one, so that a restarted replica is current before it serves."""
        failure, tried = "", ""
        for _ in range(CATCH_UPS):
            newest = self._newest_unserved(time.monotonic() + seconds)
            if newest is None or weight_version(newest.epoch, newest.version) == tried:
                break
            tried = weight_version(newest.epoch, newest.version)
            if not (failure := self._update({"version": newest.version, "epoch": newest.epoch, "timeout": seconds})):
                return
        if failure:
            self._raise_on_last_rank(failure)

    def _newest_unserved(self, deadline: float) -> UpdateInfo | None:
        """The first rank's target, the same on all ranks; None: it has none, or all ranks serve it."""
        assert self._scheme is not None
        (status,) = self._scheme.status().values()
        own = {"version": status.target, "epoch": self._scheme.epoch, "serves": self._serves[:100]}
        states = {rank: json.loads(text) for rank, text in self._ranks.exchange(json.dumps(own), deadline).items()}
        if 0 not in states or not states[0]["version"]:
            return None
        version, epoch = states[0]["version"], states[0]["epoch"]
        serving = [state["serves"] == weight_version(epoch, version) for state in states.values()]
        return None if serving == [True] * self._ranks.size else UpdateInfo(version, epoch)

    # -- one update ----------------------------------------------------------------------------------------------------

    def _update(self, given: Mapping[str, Any]) -> str:
        """Returns why the version was not loaded, with the reasons of all ranks, or ``""``."""
        started, seconds = time.monotonic(), UpdateInfo.timeout
        problems: dict[int, str] | None = None  # None until this rank has voted
        name = "the version"
        try:
            info = UpdateInfo.given(given)
            seconds, name = info.timeout, weight_version(info.epoch, info.version)
            if self._scheme is None:
                raise RuntimeError("there is no sender: init_weight_transfer_engine comes first")
            with self._scheme.take(info.version, epoch=info.epoch, timeout=seconds) as taken:
                error: Exception | None = None
                try:
                    self.load(taken.items())
                except Exception as raised:
                    error = raised
                problems = self._ranks.vote(_text(error), started + seconds + MARGIN)
                if problems:
                    self._go_back(taken if name == self._serves else taken.previous, error)
                    raise error or UpdateFailed(f"{_listed(problems)}. This rank went back to {self._serves}")
                self._serves = name
        except Exception as error:
            if problems == {}:  # all ranks have loaded it and serve it, but this rank could not acknowledge it
                logger.warning("asyncsync: %s was loaded, but could not be acknowledged to its sender: %s", name, error)
                return ""
            logger.exception("asyncsync: rank %d has not loaded %s", self._ranks.rank, name)
            if problems is None:  # this rank could not take the version, and has changed nothing
                problems = self._ranks.vote(_text(error), started + seconds + MARGIN)
            elif isinstance(error, EngineLost):
                self._serves = f"a mixture ({error})"
        if not problems:
            return ""
        served = self._ranks.exchange(self._serves, time.monotonic() + seconds + MARGIN)
        return f"{name} was not loaded: {_listed(problems)}. {_serving(served, self._ranks.size)}"

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load all weights into the model, whatever it holds."""
        initialize_layerwise_reload(self.model)
        with disable_mtp_completeness_check():
            self.model.load_weights(weights)
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # the device must have read the weights before their loan ends

    def _go_back(self, previous: Any, error: Exception | None) -> None:
        """Load the version before. Raises EngineLost if that fails."""
        try:
            # Half-loaded layers would load the weights that they have got so far. Without these, they get back the
            # tensors that they had.
            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                info.loaded_weights.clear()
                info.load_numel = 0
            finalize_layerwise_reload(self.model, self.model_config)
            if previous is not None:
                self.load(previous.items())
                self._serves = weight_version(previous.epoch, previous.version)
            else:
                reload_weights(self.vllm_config, self.model, None, None, True)
                self._serves = FILES
        except Exception as second:
            lost = f"rank {self._ranks.rank} could not go back to {self._serves}: {_text(second)}"
            raise EngineLost(f"{lost}: load another version, or restart this replica") from (error or second)

    def _raise_on_last_rank(self, failure: str) -> None:
        parallel = self.parallel_config
        if parallel.rank == parallel.world_size - 1:  # the last rank of this executor
            raise UpdateFailed(failure)


def _text(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _listed(problems: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank}: {problem}" for rank, problem in sorted(problems.items()))


def _serving(served: Mapping[int, str], size: int) -> str:
    """A sentence that says what the ranks serve after a failed update."""
    if len(served) == size and len(set(served.values())) == 1:
        return f"All ranks serve {next(iter(served.values()))}"
    each = [f"rank {rank}: {served.get(rank, 'unknown, it does not answer')}" for rank in range(size)]
    return f"The ranks serve different weights, so load another version or restart this replica ({'; '.join(each)})"
