"""Programs of their own, for what leaves things behind in the one that it is used in."""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch


def in_program(function: Callable[..., Any], *args: Any, seconds: float = 55, start_method: str = "spawn") -> Any:
    """What a function returns in a program of its own, which may have processes. ``start_method``: of that program."""
    context: Any = multiprocessing.get_context(start_method)
    here, there = context.Pipe()
    process = context.Process(target=_report, args=(there, function, args))
    process.start()
    there.close()
    try:
        assert here.poll(seconds), "it hangs"
        result, failure = here.recv()
        assert failure is None, failure
        process.join(10)
    finally:
        process.kill()
        process.join()
        process.close()
        here.close()
    return result


def _report(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        pipe.send((function(*args), None))
    except Exception:
        pipe.send((None, traceback.format_exc()))
