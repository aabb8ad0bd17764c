"""Real vLLM: `make engines` has an environment with it, in which these tests run."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _libraries(_process_wide: None) -> None:
    """Have transformers open what it keeps before anything is counted, and leave a core to vLLM."""
    import torch
    import tqdm

    from helpers.vllm_replicas import PROMPTS, Reference, make_model

    tqdm.tqdm.monitor_interval = 0  # its thread would stay
    torch.set_num_threads(1)
    Reference(make_model()).check(0, PROMPTS[0], [])
