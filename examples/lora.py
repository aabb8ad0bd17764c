"""A low-rank adapter's weights into models that are running. Run me: python lora.py

The trainer trains nothing but the adapters of a model: two thin matrices beside each linear layer, whose own weights
are frozen. Workers answer with the same model all the time. By the scheme's pattern, include="*.lora_?", only the
adapters travel, a small part of the model; the frozen weights of the workers are never touched.
"""

import asyncio
import contextlib
import multiprocessing
import signal

import torch
from torch import nn

from asyncsync import ClosedError, SharedMemWeightSyncScheme

WORKERS, UPDATES, STEPS = 2, 5, 40
WIDTH, RANK = 256, 4


class Adapted(nn.Module):
    """A frozen linear layer plus what is learnt beside it: Hu et al., 2021, https://arxiv.org/abs/2106.09685."""

    def __init__(self, width, rank):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.lora_b = nn.Parameter(torch.zeros(width, rank))  # so that the adapter begins as nothing

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def pretrained():
    """The model that everybody has loaded, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(Adapted(WIDTH, RANK), nn.ReLU(), Adapted(WIDTH, RANK))


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def work(scheme, index):
    asyncio.run(worker(scheme, index))


async def worker(scheme, index):
    torch.set_num_threads(1)
    model = pretrained()
    frozen = model[0].base.weight.clone()
    question = torch.ones(WIDTH)
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    async with scheme:
        await scheme.connect()
        answered = 0
        try:
            while True:
                with torch.no_grad(), scheme.hold() as held:
                    answer = model(question).mean().item()
                if held.version != answered:
                    answered, loss = held.version, held.metadata.get("loss")
                    print(f"worker {index}: version {answered} (loss {loss}) answers {answer:+.3f}", flush=True)
                await scheme.receive(timeout=0.05)
        except ClosedError:
            untouched = torch.equal(model[0].base.weight, frozen)
            print(
                f"worker {index}: version {scheme.version} is the last; frozen weights untouched: {untouched}",
                flush=True,
            )


async def train(scheme, model, workers):
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(adapters, lr=1e-2)
    print(f"an update has {bytes_of(adapters)} of the model's {bytes_of(model.parameters())} bytes", flush=True)
    async with scheme:
        await scheme.connect(processes=workers)
        for _ in range(UPDATES):
            loss = round(await asyncio.to_thread(learn, model, optimizer), 3)
            version = await scheme.send_async(metadata={"loss": loss})
            print(f"trainer: version {version} is everywhere, loss {loss}", flush=True)


def learn(model, optimizer):
    """Some steps towards a model that answers with twice the negative of what it is asked."""
    for _ in range(STEPS):
        question = torch.randn(64, WIDTH)
        loss = (model(question) + 2 * question).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    torch.set_num_threads(1)
    model, scheme = pretrained(), SharedMemWeightSyncScheme(include="*.lora_?")
    scheme.init_on_sender(model_id="policy", model=model, num_workers=WORKERS)
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work, args=(scheme, index), daemon=True) for index in range(WORKERS)]
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers inherit this: Ctrl-C is for the trainer
    for process in workers:
        process.start()
    signal.signal(signal.SIGINT, handler)
    asyncio.run(train(scheme, model, workers))
    for process in workers:
        process.join(timeout=10)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
