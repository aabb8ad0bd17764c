"""Reinforcement learning of a language model that vLLM generates with. Run me: python vllm_trainer.py

A few steps as of GRPO, on a random Qwen3 of 10 MB: vLLM samples a group of answers to each prompt, a toy reward counts
even tokens, and the trainer moves the weights towards the answers that beat their group. Then `fleet.update()` has vLLM
switch: the weights are there before it pauses, and either all its ranks serve the new version or all the one before.

Takes three minutes on two cores without a GPU. Needs vLLM 0.28 or later, and transformers (docs/engines.md).
"""

import argparse
import asyncio
import os
import tempfile
from typing import Any

import torch

from asyncsync import SharedMemWeightSyncScheme
from asyncsync.engines import Fleet, LLMReplica

PROMPTS = [[5, 17, 300, 42], [7, 8], [100, 101, 102], [200, 3, 200, 3]]
GROUP, TOKENS = 16, 16  # answers to each prompt, and their length
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def make_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).float()


def reward(answer: list[int]) -> float:
    return sum(token % 2 == 0 for token in answer) / len(answer)


def loss_of(model: Any, prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    """Of one group: answers with more than its mean reward become likelier, the others less so."""
    rewards = torch.tensor([reward(answer) for answer in answers])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    tokens = torch.tensor([prompt + answer for answer in answers])
    logits = model(tokens).logits[:, len(prompt) - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, tokens[:, len(prompt) :, None]).squeeze(-1)
    return -(advantages[:, None] * log_probs).mean()


async def main(steps: int) -> None:
    from vllm import LLM, SamplingParams

    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheme = SharedMemWeightSyncScheme(strategy="state_dict", min_workers=0)
    scheme.init_on_sender(model_id="policy", model=model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(
            folder,
            load_format="dummy",  # random weights, until the trainer's are there
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            gpu_memory_utilization=0.1,
            weight_transfer_config={"backend": "asyncsync"},
        )
    sampling = SamplingParams(n=GROUP, temperature=1.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    replica = LLMReplica(llm)
    async with scheme, Fleet(scheme, [replica]) as fleet:
        await scheme.connect()
        (await fleet.connect()).raise_for_failures()
        for step in range(1, steps + 1):
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            outputs = await replica.run(llm.generate, prompts, sampling, use_tqdm=False)
            groups = [[list(answer.token_ids) for answer in output.outputs] for output in outputs]
            mean = sum(reward(answer) for group in groups for answer in group) / len(groups) / GROUP
            print(f"step {step}: version {fleet.serving['LLM']}, reward {mean:.2f}, {groups[0][0][:6]} …", flush=True)
            optimizer.zero_grad()
            for prompt, group in zip(PROMPTS, groups, strict=True):
                loss_of(model, prompt, group).backward()
            optimizer.step()
            (await fleet.update()).raise_for_failures()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    asyncio.run(main(arguments.steps))
