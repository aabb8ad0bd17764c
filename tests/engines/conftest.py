"""Real vLLM: `make engines` has an environment with it, in which these tests run."""

from importlib.util import find_spec

import pytest

from helpers import leaks

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
if find_spec("vllm"):
    # A server lasts for several tests. What its processes make meanwhile in /dev/shm, where nothing of ours is, goes
    # with it, or is removed when it has ended.
    leaks.KINDS[leaks.SEGMENT] = set


@pytest.fixture(scope="session", autouse=True)
def _libraries(_process_wide: None) -> None:
    """Have transformers open what it keeps before anything is counted, and leave a core to vLLM."""
    import torch
    import tqdm

    from helpers.vllm_replicas import PROMPTS, Reference, make_model

    tqdm.tqdm.monitor_interval = 0  # its thread would stay
    torch.set_num_threads(1)
    Reference(make_model()).check(0, PROMPTS[0], [])
