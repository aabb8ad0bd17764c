"""How many bytes of a model change in a training step, and how many travel. Run me: python benchmarks/delta.py

A small GPT (51 million parameters) is trained on the sources of Python's standard library, with AdamW and float32
master weights; its bfloat16 copy is what a policy in rollout workers would be. After 50 steps the versions of the next
steps are sent, one after the other, to a worker process behind a link of 1 Gbit/s (benchmarks/shaped_link.py): as they
are, with `compress`, with `delta`, and with both. What has passed the link is counted there, headers included.

    python benchmarks/delta.py --lr 1e-5 --lr 1e-4 --write benchmarks/delta.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import socket
import statistics
import sysconfig
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from shaped_link import ShapedLink
from torch import nn

from asyncsync import ClosedError, ZMQWeightSyncScheme

BATCH, LENGTH, HEADS = 2, 32, 8
SENT = 5  # versions; the first of them comes with connect
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "compress=lz4": {"compress": "lz4"},
    "compress=zstd": {"compress": "zstd"},
    "delta": {"delta": True},
    "delta, lz4": {"delta": True, "compress": "lz4"},
    "delta, zstd": {"delta": True, "compress": "zstd"},
}

State = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        q, k, v = (
            part.view(count, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(count, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Tied embeddings, as many of the parameters as in small language models."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(words, width), nn.Embedding(LENGTH, width)
        for table in (self.embedding, self.position):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.blocks(self.embedding(tokens) + self.position.weight))
        return hidden @ self.embedding.weight.T


def corpus(words: int) -> torch.Tensor:
    """The standard library's modules, as the indices of their words."""
    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += re.findall(r"\w+|[^\w\s]|\n", path.read_text(errors="ignore"))
    known = {word: i for i, (word, _) in enumerate(Counter(found).most_common(words))}
    return torch.tensor([known[word] for word in found if word in known])


def train(shape: tuple[int, int, int], lr: float, steps: int) -> tuple[list[State], float]:
    """The bfloat16 versions of the last few steps, and the last loss."""
    torch.manual_seed(0)
    model, text = GPT(*shape), corpus(shape[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    versions: list[State] = []
    loss = torch.zeros(())
    for step in range(steps + SENT - 1):
        begins = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
        batch = torch.stack([text[i : i + LENGTH + 1] for i in begins])
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step >= steps - 1:
            versions.append({name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()})
    return versions, loss.item()


def changes(versions: list[State]) -> dict[str, float]:
    """Which share of the numbers, and of the bytes, a step changes."""
    numbers = bytes_ = total = 0
    for old, new in pairwise(versions):
        for name in old:
            changed = old[name].view(torch.int16) ^ new[name].view(torch.int16)
            total += changed.numel()
            numbers += int((changed != 0).sum())
            bytes_ += int((changed.view(torch.uint8) != 0).sum())
    return {"numbers": numbers / total, "bytes": bytes_ / (2 * total)}


def worker(scheme: ZMQWeightSyncScheme, shape: tuple[int, int, int], connection: Connection) -> None:
    """A worker process; it ends with its sender."""
    model = GPT(*shape).to(torch.bfloat16)

    async def main() -> None:
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
        async with scheme:
            await scheme.connect(timeout=120)
            with suppress(ClosedError):
                while True:
                    await scheme.receive()

    asyncio.run(main())
    connection.send(dict(scheme.bus.dropped))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def send(
    versions: list[State], shape: tuple[int, int, int], rate: float, options: dict[str, Any]
) -> dict[str, float]:
    """Bytes and seconds of an update, from ``send_async`` to its application: medians."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    with ShapedLink(("127.0.0.1", port), rate) as link:
        here, there = context.Pipe()
        sender = ZMQWeightSyncScheme(
            endpoint=f"tcp://127.0.0.1:{port}", connect=link.endpoint, num_workers=1, **options
        )
        source = GPT(*shape).to(torch.bfloat16)
        source.load_state_dict(versions[0])
        sender.init_on_sender(model_id="policy", model=source)
        process = context.Process(target=worker, args=(sender, shape, there), daemon=True)
        process.start()
        travelled, seconds = [], []
        async with sender:
            await sender.connect(timeout=120)
            for version in versions[1:]:
                source.load_state_dict(version)
                await asyncio.sleep(0.1)
                before, begun = link.bytes_down, time.perf_counter()
                await sender.send_async(timeout=120)
                seconds.append(time.perf_counter() - begun)
                travelled.append(link.bytes_down - before)
        assert here.recv() == {}
        process.join()
    return {"bytes": statistics.median(travelled), "seconds": statistics.median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--lr", type=float, action="append", help="learning rates (1e-5)")
    parser.add_argument("--steps", type=int, default=50, help="of training, before what is sent (50)")
    parser.add_argument("--words", type=int, default=32768, help="of the vocabulary (32768)")
    parser.add_argument("--width", type=int, default=512, help="of the model (512)")
    parser.add_argument("--layers", type=int, default=11, help="of the model (11)")
    parser.add_argument("--rate", type=float, default=1e9, help="of the link, in bits per second (1e9)")
    parser.add_argument("--only", choices=VARIANTS, action="append", help="of the ways to send (all)")
    parser.add_argument("--write", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    shape = arguments.words, arguments.width, arguments.layers
    results = []
    for lr in arguments.lr or [1e-5]:
        versions, loss = train(shape, lr, arguments.steps)
        count = sum(tensor.numel() for tensor in versions[0].values())
        changed = changes(versions)
        print(
            f"{count / 1e6:.1f} million parameters, lr {lr:g}, {arguments.steps} steps, loss {loss:.2f}: a step "
            f"changes {100 * changed['numbers']:.1f} % of the numbers, {100 * changed['bytes']:.1f} % of the bytes"
        )
        print(f"{'':16}{'MB/update':>12}{'share':>8}{'ms/update':>12}")
        figures = {}
        for name in arguments.only or VARIANTS:
            options = VARIANTS[name]
            found = figures[name] = asyncio.run(send(versions, shape, arguments.rate, options))
            share = found["bytes"] / (2 * count)
            print(f"{name:16}{found['bytes'] / 1e6:12.1f}{100 * share:7.1f}%{1e3 * found['seconds']:12.0f}", flush=True)
        results.append({"lr": lr, "parameters": count, "loss": loss, "changed": changed, "sent": figures})
    if arguments.write is not None:
        arguments.write.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
