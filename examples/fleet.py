"""A trainer updates two inference replicas as one, while a client asks them. One is killed, and comes back.

    python examples/fleet.py

The replicas are small servers of their own processes, with a torch model and the routes that vLLM has for RL, so that
this runs without vLLM. vLLM itself is started as

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "asyncsync"}'

and the trainer's side stays as it is: HTTPReplica gets that server's address, and ranks= its tensor parallel size.
"""

import argparse
import asyncio
import json
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn

import asyncsync.sync
from asyncsync.engines.fleet import Fleet
from asyncsync.engines.replicas import HTTPReplica

# -- a replica ---------------------------------------------------------------------------------------------------------


class Engine:
    """A model, and what the routes do with it. The name of its version is "default" until the fleet gives it one."""

    def __init__(self) -> None:
        self.model, self.name = nn.Linear(2, 1), "default"
        self.turn, self.is_paused = threading.Condition(), False

    def handle(self, path: str, body: dict) -> dict:
        match path:
            case "/weight_info":
                return {"weight_version": self.name}
            case "/update_weight_version":
                self.name = body["new_version"]
            case "/finish_weight_update":
                self.name = body.get("weight_version", self.name)
            case "/init_weight_transfer_engine":
                self.connect(body["init_info"])
            case "/update_weights":
                self.load(**body["update_info"])
            case "/pause" | "/resume":
                with self.turn:
                    self.is_paused = path == "/pause"
                    self.turn.notify_all()
            case "/predict":
                with self.turn, torch.no_grad():
                    self.turn.wait_for(lambda: not self.is_paused)
                    return {"version": self.name, "outputs": self.model(torch.tensor(body["inputs"])).tolist()}
        return {"success": True}  # start_weight_update, reset_prefix_cache: there is nothing to do

    def connect(self, info: dict) -> None:
        self.scheme = asyncsync.sync.SharedMemWeightSyncScheme(connect=info["endpoint"])
        self.scheme.init_on_receiver(info["model_id"], worker_idx=info["first_worker"], apply="on_take", reconnect=True)
        self.scheme.connect(timeout=info["timeout"])
        [status] = self.scheme.status().values()
        if status.target:
            self.load(status.target, self.scheme.epoch, info["timeout"])

    def load(self, version: int, epoch: str, timeout: float) -> None:
        with self.scheme.take(version, epoch=epoch, timeout=timeout) as taken:
            self.model.load_state_dict(dict(taken.items()))  # what it raises, the trainer gets


class Handler(BaseHTTPRequestHandler):
    engine = Engine()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            code, found = 200, self.engine.handle(self.path.partition("?")[0], json.loads(body or b"{}"))
        except Exception as error:
            code, found = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    do_GET = do_POST

    def log_message(self, *arguments: object) -> None:
        pass


def serve(port: int) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


# -- the trainer, and a client -----------------------------------------------------------------------------------------


async def start(port: int = 0) -> tuple[asyncio.subprocess.Process, int]:
    program = (sys.executable, __file__, "--serve", str(port))
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    return process, int(await process.stdout.readline())


def ask(replica: HTTPReplica) -> int:
    body = json.dumps({"inputs": [[1.0, 2.0]]}).encode()
    with urllib.request.urlopen(f"http://{replica.host}:{replica.port}/predict", body, timeout=10) as answer:
        return int(json.load(answer)["version"].rpartition(":")[2])


async def main() -> None:
    model = nn.Linear(2, 1)
    scheme = asyncsync.SharedMemWeightSyncScheme(min_workers=0)  # replicas come and go
    scheme.init_on_sender(model_id="policy", model=model)
    servers = [await start(), await start()]
    replicas = [HTTPReplica(f"http://127.0.0.1:{port}", name=f"replica {i}") for i, (_, port) in enumerate(servers)]
    try:
        async with scheme:
            await scheme.connect()
            async with Fleet(scheme, replicas, watch=0.1) as fleet:
                (await fleet.connect()).raise_for_failures()
                for step in range(1, 13):
                    nn.init.constant_(model.bias, step)  # this is where the training would be
                    result = await fleet.update(timeout=10)
                    failed = [f"{failure.replica} failed in {failure.phase!r}" for failure in result.failures]
                    answered = [await asyncio.to_thread(ask, r) for r in replicas if r.name in result.serving]
                    print(f"version {result.version}: served by {dict(result.serving)}", *failed, sep="; ")
                    assert set(answered) == {result.version}
                    if step == 4:
                        print("replica 1 is killed")
                        servers[1][0].kill()
                        await servers[1][0].wait()
                    if step == 8:
                        servers[1] = await start(servers[1][1])
                        await asyncio.sleep(1)  # the fleet sees it, and takes it in
                        print(f"replica 1 is back, and serves version {fleet.serving.get('replica 1')}")
    finally:
        for process, _ in servers:
            if process.returncode is None:
                process.kill()
                await process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", type=int, metavar="PORT", help="be a replica; 0: any port")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve is not None:
        serve(options.serve)
    else:
        asyncio.run(asyncio.wait_for(main(), timeout=110))
