"""A trainer updates two inference replicas as one, while a client asks them. One is killed, and comes back.

Run me: python fleet.py

The replicas are processes with a small torch model and vLLM's routes for RL, so this runs without vLLM. With it, the
trainer's side is the same: HTTPReplica gets the address of a server that was started by

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "asyncsync"}'
"""

import asyncio
import json
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn

import asyncsync.sync
from asyncsync.engines import Fleet, HTTPReplica


class Engine(BaseHTTPRequestHandler):
    """Answers one request; what all have in common is in the class."""

    model, version = nn.Linear(2, 1), "default"  # what vLLM calls the version that it starts with
    turn, is_paused = threading.Condition(), False
    scheme: asyncsync.sync.WeightSyncScheme

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        try:
            code, found = 200, self.route(self.path.partition("?")[0], body)
        except Exception as error:
            code, found = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        self.send_response_only(code)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    do_GET = do_POST

    def route(self, path: str, body: dict) -> dict:
        match path:
            case "/predict":
                with Engine.turn, torch.no_grad():
                    Engine.turn.wait_for(lambda: not Engine.is_paused)
                    return {"version": Engine.version, "outputs": self.model(torch.tensor(body["inputs"])).tolist()}
            case "/weight_info":
                return {"weight_version": Engine.version}
            case "/get_world_size":
                return {"world_size": 1}
            case "/pause" | "/resume":
                with Engine.turn:
                    Engine.is_paused = path == "/pause"
                    Engine.turn.notify_all()
            case "/init_weight_transfer_engine":
                self.connect(**body["init_info"])
            case "/update_weights":
                self.load(**body["update_info"])
            case "/finish_weight_update" | "/update_weight_version":
                Engine.version = next(iter(body.values()), Engine.version)
        return {"success": True}  # there is nothing to do for start_weight_update and reset_prefix_cache

    def connect(self, endpoint: str, model_id: str, first_worker: int, timeout: float, scheme: str) -> None:
        Engine.scheme = asyncsync.sync.WeightSyncScheme.from_backend(scheme, connect=endpoint)
        Engine.scheme.init_on_receiver(model_id, worker_idx=first_worker, apply="on_take", reconnect=True)
        Engine.scheme.connect(timeout=timeout)
        if newest := Engine.scheme.status()[first_worker].target:
            self.load(newest, Engine.scheme.epoch, timeout)

    def load(self, version: int, epoch: str, timeout: float) -> None:
        with Engine.scheme.take(version, epoch=epoch, timeout=timeout) as taken:
            self.model.load_state_dict(dict(taken.items()))  # what it raises, the trainer gets


def start(port: int = 0) -> tuple[subprocess.Popen[bytes], int]:
    process = subprocess.Popen([sys.executable, __file__, str(port)], stdout=subprocess.PIPE)
    return process, int(process.stdout.readline())


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def ask(replica: HTTPReplica) -> int:
    body = json.dumps({"inputs": [[1.0, 2.0]]}).encode()
    with urllib.request.urlopen(f"http://{replica.host}:{replica.port}/predict", body, timeout=10) as answer:
        return int(json.load(answer)["version"].rpartition(":")[2])


async def main() -> None:
    model = nn.Linear(2, 1)
    scheme = asyncsync.SharedMemWeightSyncScheme(min_workers=0)  # replicas come and go
    scheme.init_on_sender(model_id="policy", model=model)
    servers = [start(), start()]
    replicas = [HTTPReplica(f"http://127.0.0.1:{port}", name=f"replica {i}") for i, (_, port) in enumerate(servers)]
    try:
        async with scheme:
            await scheme.connect()
            async with Fleet(scheme, replicas, watch=0.1) as fleet:
                for step in range(9):
                    nn.init.constant_(model.bias, step)  # this is where the training would be
                    result = await fleet.update(timeout=10)
                    failed = [f"{failure.replica} failed in {failure.phase!r}" for failure in result.failures]
                    answers = [await asyncio.to_thread(ask, r) for r in replicas if r.name in result.serving]
                    print(f"version {result.version}: answers by {answers}", *failed, sep="; ")
                    if step == 2:
                        print("replica 1 is killed")
                        kill(servers[1][0])
                    if step == 5:
                        servers[1] = start(servers[1][1])
                        await asyncio.sleep(1)  # the fleet sees it, and takes it in
                        print(f"replica 1 is back, and serves version {fleet.serving.get('replica 1')}")
    finally:
        for process, _ in servers:
            kill(process)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Engine)
        print(server.server_address[1], flush=True)
        server.serve_forever()
    asyncio.run(asyncio.wait_for(main(), timeout=110))
