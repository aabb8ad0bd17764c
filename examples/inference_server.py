"""An HTTP server that follows a trainer, and goes on answering while that one is restarted.

Run me: python inference_server.py, or each part by itself:

    python inference_server.py train ENDPOINT --checkpoint FILE     # one at a time, again and again
    python inference_server.py serve ENDPOINT --port 8000
    curl -i localhost:8000/predict -d '{"inputs": [[1, 2]]}'        # x-weight-version: 12, {"outputs": [[-0.18]]}

Without arguments it runs both, asks all along, and kills the trainer in between. A server needs no trainer to answer:
it has weights of its own, which are replaced between two calls of the model. `follow` has each response name the
version that it was made with. `reconnect=True` has the server follow the next trainer on the same endpoint, and the
trainer's checkpoint has versions go on where they were.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from typing import Any

import torch
import uvicorn
from torch import nn

from asyncsync import ZMQWeightSyncScheme
from asyncsync.engines import follow

# -- the trainer -------------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    return nn.Linear(2, 1)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step towards 3 a − 2 b."""
    inputs = torch.randn(64, 2)
    loss = (model(inputs) - inputs @ torch.tensor([[3.0], [-2.0]])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def save(path: str, **state: object) -> None:
    torch.save(state, f"{path}.new")
    os.replace(f"{path}.new", path)  # whole, or not at all


def load(path: str, model: nn.Module, scheme: ZMQWeightSyncScheme) -> None:
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        scheme.load_state_dict(saved["scheme"])


async def train(endpoint: str, checkpoint: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    scheme = ZMQWeightSyncScheme(endpoint=endpoint, min_workers=0)  # servers come and go
    load(checkpoint, model, scheme)
    scheme.init_on_sender(model_id="policy", model=model)
    async with scheme:
        await scheme.connect()
        print(f"trainer: begins with version {scheme.version}", flush=True)
        while True:
            loss = await asyncio.to_thread(learn, model, optimizer)
            # The number first: whenever this process is killed, no two versions get the same one.
            save(checkpoint, model=model.state_dict(), scheme={"version": scheme.version + 1})
            await scheme.publish(metadata={"loss": round(loss, 4)})
            await asyncio.sleep(0.1)


# -- the server --------------------------------------------------------------------------------------------------------


class Server:
    """An ASGI application with POST /predict and GET /status. Starlette's or FastAPI's would do as well."""

    def __init__(self, scheme: ZMQWeightSyncScheme, model: nn.Module) -> None:
        self.scheme, self.model = scheme, model

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more and len(body) < 1 << 20:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        code, found = await self.answer(scope["method"], scope["path"], body)
        answer = json.dumps(found).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": code, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, object]]:
        if (method, path) == ("GET", "/status"):
            [status] = self.scheme.status().values()
            about = {"version": self.scheme.version, **self.scheme.metadata}
            return 200, {**about, "trainer": status.state, "why": status.reason}
        if (method, path) != ("POST", "/predict"):
            return 404, {"error": "there are POST /predict and GET /status"}
        try:
            inputs = torch.tensor(json.loads(body)["inputs"], dtype=torch.float32)
            outputs = await asyncio.to_thread(self.model, inputs)  # of one version
            return 200, {"outputs": outputs.tolist()}
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            return 400, {"error": f"inputs is a list of pairs of numbers ({error})"}


async def serve(endpoint: str, port: int, index: int) -> None:
    model = make_model().requires_grad_(False)
    scheme = ZMQWeightSyncScheme(endpoint=endpoint)
    scheme.init_on_receiver("policy", model=model, worker_idx=index, reconnect=True)
    listening = socket.create_server(("127.0.0.1", port))
    async with follow(Server(scheme, model), scheme, timeout=600) as served:  # it waits for the first trainer
        print(f"server: http://127.0.0.1:{listening.getsockname()[1]} has version {scheme.version}", flush=True)
        await uvicorn.Server(uvicorn.Config(served, log_level="warning", lifespan="off")).serve([listening])


# -- both --------------------------------------------------------------------------------------------------------------


async def ask(port: int, inputs: list[list[float]]) -> tuple[int, dict[str, object]]:
    """The version that has answered, and its answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps({"inputs": inputs}).encode()
        head = "POST /predict HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write((head % len(body)).encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if " 200 " not in head:
            raise RuntimeError(head)
        headers = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        found: dict[str, object] = json.loads(await reader.readexactly(int(headers["content-length"])))
        return int(headers["x-weight-version"]), found
    finally:
        writer.close()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, __file__, *arguments, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )


async def both(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as directory:
        endpoint, checkpoint = f"ipc://{directory}/bus", f"{directory}/checkpoint.pt"
        trainer, server = await start("train", endpoint, "--checkpoint", checkpoint), await start("serve", endpoint)
        try:
            assert server.stdout is not None
            while b" has version " not in (line := await server.stdout.readline()):
                print(line.decode().rstrip(), flush=True)
            port = int(line.split(b" ")[1].rpartition(b":")[2])
            loop = asyncio.get_running_loop()
            versions, killed, end = [], 0, loop.time() + seconds
            before = 0
            while loop.time() < end or versions[-1] <= before + 1:  # until the second trainer has been heard of
                version, found = await ask(port, [[1.0, 2.0]])
                versions.append(version)
                if not killed and versions[-1] > versions[0] + 3:
                    killed, before = trainer.pid, versions[-1]
                    print(f"version {before}: the trainer is killed", flush=True)
                    trainer.send_signal(signal.SIGKILL)
                    await trainer.wait()
                    trainer = await start("train", endpoint, "--checkpoint", checkpoint)
                await asyncio.sleep(0.02)
            assert versions == sorted(versions)
            print(f"{len(versions)} requests, all answered, by versions {versions[0]} to {versions[-1]}: {found}")
        finally:
            for process in (trainer, server):
                if process.returncode is None:
                    process.kill()
                    await process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    roles = parser.add_subparsers(dest="role")
    for role in ("train", "serve"):
        roles.add_parser(role).add_argument("endpoint")
    roles.choices["train"].add_argument("--checkpoint", required=True)
    roles.choices["serve"].add_argument("--port", type=int, default=0)
    roles.choices["serve"].add_argument("--index", type=int, default=0, help="each server has one of its own")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.role == "train":
        asyncio.run(train(options.endpoint, options.checkpoint))
    elif options.role == "serve":
        asyncio.run(serve(options.endpoint, options.port, options.index))
    else:
        asyncio.run(asyncio.wait_for(both(seconds=5.0), timeout=110))
