"""Replicas: a fleet calls one vLLM engine through such an object, over HTTP or in this process.

Each method is one call of vLLM. If the engine answers with an error, the method raises :class:`Refused` with the
engine's message. After any other exception, it is unknown whether the engine has done what it was asked to do. The
methods have no deadlines, because the fleet cancels them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode, urlsplit

from asyncsync.errors import WeightSyncError

T = TypeVar("T")
MAX_ANSWER = 1 << 22  # bytes
PAUSES = ("keep", "wait", "abort")


class Refused(WeightSyncError):
    """The engine has answered with an error; this has its message."""


class Replica(Protocol):
    """One inference engine of a fleet.

    Attributes:
        name: its name in results.
        ranks: how many processes hold its model: tensor × pipeline × data parallel.
        init: fields of :class:`asyncsync.engines.vllm.info.InitInfo` for its engine, besides those that the fleet
            sets, such as ``{"client_key": path}``.
    """

    name: str
    ranks: int
    init: Mapping[str, Any]

    async def weight_version(self) -> str:
        """The name of the version that it serves; ``"default"`` after its start."""

    async def set_weight_version(self, name: str) -> None:
        """Set that name, and change nothing else."""

    async def world_size(self) -> int:
        """The number of its ranks."""

    async def connect(self, info: Mapping[str, Any]) -> None:
        """Have it connect to the sender, and load the newest version."""

    async def pause(self) -> None:
        """Have it generate no more tokens."""

    async def resume(self) -> None:
        """End the pause, if it is paused."""

    async def start(self) -> None:
        """Begin an update."""

    async def update(self, info: Mapping[str, Any]) -> None:
        """Have it load a version; ``info`` has ``"version"``, ``"epoch"`` and ``"timeout"``."""

    async def finish(self, name: str | None) -> None:
        """End the update. ``name``: of the version that it serves now; None: it serves the one before."""

    async def reset(self) -> None:
        """Clear what it has computed with the weights before, also for running requests."""

    async def close(self) -> None:
        """Release this object's resources. The engine goes on."""


class HTTPReplica:
    """A vLLM server that was started with ``VLLM_SERVER_DEV_MODE=1``, which adds the routes that this uses.

    Args:
        url: ``http://host:port``, or https.
        name: its name in results; empty: host and port.
        ranks: tensor × pipeline × data parallel size.
        pause: what happens to running requests: ``"keep"``: they go on after the pause, with the new weights;
            ``"wait"``: the pause begins when they have ended; ``"abort"``: they are aborted.
        init: see :class:`Replica`.
        headers: sent with each request, for example because a proxy needs them.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        ranks: int = 1,
        pause: str = "keep",
        init: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None or parts.query or parts.fragment:
            raise ValueError(f"a replica's address is http://host:port, not {url!r}")
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._is_encrypted, self._path, self._headers = parts.scheme == "https", parts.path.rstrip("/"), headers or {}
        self._mode = _checked_pause(pause)
        self.name, self.ranks, self.init = name or f"{self.host}:{self.port}", ranks, init or {}

    async def weight_version(self) -> str:
        return str((await self._request("GET", "/weight_info"))["weight_version"])

    async def set_weight_version(self, name: str) -> None:
        await self._request("POST", "/update_weight_version", {"new_version": name})

    async def world_size(self) -> int:
        return int((await self._request("GET", "/get_world_size"))["world_size"])

    async def connect(self, info: Mapping[str, Any]) -> None:
        await self._request("POST", "/init_weight_transfer_engine", {"init_info": dict(info)})

    async def pause(self) -> None:
        await self._request("POST", f"/pause?{urlencode({'mode': self._mode, 'clear_cache': 'false'})}")

    async def resume(self) -> None:
        await self._request("POST", "/resume")

    async def start(self) -> None:
        await self._request("POST", "/start_weight_update")

    async def update(self, info: Mapping[str, Any]) -> None:
        await self._request("POST", "/update_weights", {"update_info": dict(info)})

    async def finish(self, name: str | None) -> None:
        await self._request("POST", "/finish_weight_update", {} if name is None else {"weight_version": name})

    async def reset(self) -> None:
        _check_reset((await self._request("POST", "/reset_prefix_cache?reset_running_requests=true"))["success"])

    async def close(self) -> None:
        """Do nothing, because each request has a connection of its own."""

    async def _request(self, method: str, path: str, body: Any = None) -> Any:
        """Make one request of HTTP/1.0, so that the answer ends with the connection. This uses asyncio's streams,
        because a request in a thread could not be cancelled."""
        text = b"" if body is None else json.dumps(body).encode()
        headers = {"Host": f"{self.host}:{self.port}", "Content-Type": "application/json", **self._headers}
        lines = [f"{method} {self._path}{path} HTTP/1.0", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join([*lines, f"Content-Length: {len(text)}", "", ""])
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self._is_encrypted or None)
        try:
            writer.write(head.encode("latin-1") + text)
            answer = bytearray()
            while more := await reader.read(1 << 16):
                answer += more
                if len(answer) > MAX_ANSWER:
                    raise ConnectionError(f"{self.name} answers {path} with more than {MAX_ANSWER} bytes")
        finally:
            writer.close()
        answer_head, end, payload = bytes(answer).partition(b"\r\n\r\n")
        status = answer_head.split(None, 2)[1:2]
        if not end or not status or not status[0].isdigit():
            raise ConnectionError(f"{self.name} has closed the connection before it answered {path}")
        try:
            result = json.loads(payload or b"{}")
        except ValueError:
            result = payload[:2000].decode(errors="replace")
        if status[0] == b"200":
            return result
        error = result.get("error", result) if isinstance(result, dict) else result
        message = error.get("message", error) if isinstance(error, dict) else error
        hint = "; is VLLM_SERVER_DEV_MODE=1 set there?" if status[0] == b"404" else ""
        raise Refused(f"{path.partition('?')[0]}: {status[0].decode()}: {message}{hint}")


class _LocalReplica:
    """An engine of this process. The methods that it names alike, however they are called."""

    _engine: Any

    async def weight_version(self) -> str:
        return str(await self._call(self._engine.get_weight_version))

    async def set_weight_version(self, name: str) -> None:
        await self._call(self._engine.update_weight_version, name)

    async def start(self) -> None:
        await self._call(self._engine.start_weight_update)

    async def finish(self, name: str | None) -> None:
        await self._call(self._engine.finish_weight_update, name)

    async def reset(self) -> None:
        _check_reset(await self._call(self._engine.reset_prefix_cache, reset_running_requests=True))

    async def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return await self._run(function, *arguments, **named)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error

    async def _run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return await function(*arguments, **named)


class AsyncLLMReplica(_LocalReplica):
    """An ``AsyncLLM`` of this process, on this event loop. Arguments as of :class:`HTTPReplica`."""

    def __init__(
        self,
        engine: Any,
        *,
        name: str = "AsyncLLM",
        ranks: int = 1,
        pause: str = "keep",
        init: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine, self._mode = engine, _checked_pause(pause)
        self.name, self.ranks, self.init = name, ranks, init or {}

    async def world_size(self) -> int:
        return int(self._engine.vllm_config.parallel_config.world_size_across_dp)

    async def connect(self, info: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=dict(info))
        await self._call(self._engine.init_weight_transfer_engine, request)

    async def pause(self) -> None:
        await self._call(self._engine.pause_generation, mode=self._mode, clear_cache=False)

    async def resume(self) -> None:
        await self._call(self._engine.resume_generation)

    async def update(self, info: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._call(self._engine.update_weights, WeightTransferUpdateRequest(update_info=dict(info)))

    async def close(self) -> None:
        """Do nothing, because the engine is the caller's."""


class LLMReplica(_LocalReplica):
    """An ``LLM`` of this process. Its methods block, so this object calls them in a thread of its own. Generate with
    ``await replica.run(llm.generate, …)``. Arguments as of :class:`HTTPReplica`; a pause begins when running calls have
    ended."""

    def __init__(self, llm: Any, *, name: str = "LLM", ranks: int = 1, init: Mapping[str, Any] | None = None) -> None:
        self._engine = llm
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock, self._is_paused = asyncio.Lock(), False  # held by each call of run(), and during a pause
        self.name, self.ranks, self.init = name, ranks, init or {}

    async def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Call a function in the engine's thread. During a pause, wait until it ends."""
        async with self._lock:
            return await self._run(function, *arguments, **named)

    async def world_size(self) -> int:
        return int(self._engine.llm_engine.vllm_config.parallel_config.world_size_across_dp)

    async def connect(self, info: Mapping[str, Any]) -> None:
        await self._call(self._engine.init_weight_transfer_engine, {"init_info": dict(info)})

    async def pause(self) -> None:
        if not self._is_paused:
            await self._lock.acquire()
            self._is_paused = True

    async def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._lock.release()

    async def update(self, info: Mapping[str, Any]) -> None:
        await self._call(self._engine.update_weights, {"update_info": dict(info)})

    async def close(self) -> None:
        """End the thread after its current call. The engine is the caller's."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        # If this is cancelled, the call goes on in the thread, and the next call follows it.
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*arguments, **named))


def _checked_pause(mode: str) -> str:
    if mode not in PAUSES:
        raise ValueError(f"pause is one of {', '.join(PAUSES)}, not {mode!r}")
    return mode


def _check_reset(is_done: Any) -> None:
    if not is_done:
        raise Refused("the prefix cache was not reset, so it has results of other weights")
