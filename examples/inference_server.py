"""An HTTP server that follows a trainer, and goes on answering while that one is restarted.

Run me: python inference_server.py, or each part by itself:

    python inference_server.py train ENDPOINT --checkpoint FILE     # one at a time, again and again
    python inference_server.py serve ENDPOINT --port 8000
    curl localhost:8000/predict -d '{"inputs": [[1, 2]]}'           # {"version": 12, "loss": 9.6, "outputs": [[-0.18]]}

Without arguments it runs both, asks all along, and kills the trainer in between. A server needs no trainer to answer:
it has weights of its own, which are replaced between two predictions. `reconnect=True` has it follow the next trainer
on the same endpoint, and the trainer's checkpoint has versions go on where they were.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile

import torch
from torch import nn

from asyncsync import NotConnected, ZMQWeightSyncScheme

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
    """Answers POST /predict and GET /status."""

    def __init__(self, scheme: ZMQWeightSyncScheme, model: nn.Module) -> None:
        self.scheme, self.model = scheme, model

    def predict(self, inputs: list[list[float]]) -> dict[str, object]:
        with torch.no_grad(), self.scheme.hold() as held:  # no update comes in between
            outputs = self.model(torch.tensor(inputs, dtype=torch.float32)).tolist()
            return {"version": held.version, **held.metadata, "outputs": outputs}

    async def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, object]]:
        if (method, path) == ("GET", "/status"):
            [status] = self.scheme.status().values()
            return 200, {"version": self.scheme.version, "trainer": status.state, "why": status.reason}
        if (method, path) != ("POST", "/predict"):
            return 404, {"error": "there are POST /predict and GET /status"}
        try:
            return 200, await asyncio.to_thread(self.predict, json.loads(body)["inputs"])
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            return 400, {"error": f"inputs is a list of pairs of numbers ({error})"}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, with any number of requests."""
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split(" ", 2)
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                code, found = await self.answer(method, path, await reader.readexactly(min(length, 1 << 20)))
                text = json.dumps(found).encode()
                head = f"HTTP/1.1 {code} -\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
                writer.write(head.encode() + text)
                await writer.drain()
        except (ValueError, ConnectionError, asyncio.IncompleteReadError):
            pass  # not HTTP, or it has gone
        finally:
            writer.close()


async def serve(endpoint: str, port: int, index: int) -> None:
    model = make_model()
    scheme = ZMQWeightSyncScheme(endpoint=endpoint)
    scheme.init_on_receiver("policy", model=model, worker_idx=index, reconnect=True)
    async with scheme:
        while True:
            try:
                await scheme.connect(timeout=10)
                break
            except NotConnected as error:
                print(f"server: {error}", flush=True)
        http = await asyncio.start_server(Server(scheme, model).serve, "127.0.0.1", port)
        print(f"server: http://127.0.0.1:{http.sockets[0].getsockname()[1]} has version {scheme.version}", flush=True)
        async with http:
            await http.serve_forever()


# -- both --------------------------------------------------------------------------------------------------------------


async def ask(port: int, inputs: list[list[float]]) -> dict[str, object]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps({"inputs": inputs}).encode()
        writer.write(b"POST /predict HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if " 200 " not in head:
            raise RuntimeError(head)
        found: dict[str, object] = json.loads(await reader.readexactly(int(head.rpartition(":")[2])))
        return found
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
                found = await ask(port, [[1.0, 2.0]])
                versions.append(int(str(found["version"])))
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
