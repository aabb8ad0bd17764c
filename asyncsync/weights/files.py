"""Weights in safetensors files, which hold tensors and texts and no code: each is written whole or not at all.

Every name has bytes of its own: tied weights are written once per name, as the format forbids shared ones. The
safetensors package is an optional one; who calls this has looked for it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

import torch

METADATA = "__metadata__"  # the format's own name


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file, whole or not at all: what is there under this name stays until all bytes are on the disk.

    Args:
        path: of the file.
        tensors: dense ones, on the CPU.
        metadata: texts that are kept with them.

    Raises:
        ValueError: the format has no such dtype or name, or the header is too large; nothing was written.
        OSError: it cannot be written there; nothing is left behind.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if METADATA in tensors:
        raise ValueError(f"safetensors files have no tensor called {METADATA!r}")
    path, seen, own = Path(path), set[int](), {}
    for name, tensor in tensors.items():
        own[name] = tensor.detach().contiguous()
        if own[name].numel() and own[name].data_ptr() in seen:
            own[name] = own[name].clone()
        seen.add(own[name].data_ptr())
    with _replacing(path) as hidden:
        try:
            save_file(own, hidden, dict(metadata))
        except KeyError as error:
            raise ValueError(f"safetensors files have no {error}") from error
        except SafetensorError as error:
            raise (OSError if "I/O" in str(error) else ValueError)(f"{path}: {error}") from error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Where to write a file that takes this one's place at the end: in a hidden directory beside it, which is locked
    meanwhile, so that :func:`remove_half_written` leaves it alone."""
    hidden = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    hidden.mkdir()
    try:
        with _opened(hidden) as directory:
            with suppress(OSError):  # on a file system without locks nothing is removed, either
                fcntl.flock(directory, fcntl.LOCK_EX)
            yield hidden / path.name
            with _opened(hidden / path.name) as file:
                os.fsync(file)
            os.replace(hidden / path.name, path)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    # The file's new name, too, is to outlive the machine's next crash.
    with _opened(path.parent) as directory:
        os.fsync(directory)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove_half_written(path: Path) -> None:
    """Remove what writers of this file have left that were killed."""
    for half in path.parent.glob(f".{escape(path.name[:200])}.????????"):
        with suppress(OSError), _opened(half) as directory:  # it is locked, or was completed meanwhile
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(half)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, in memory of the caller's own, and its metadata.

    Raises:
        ValueError: it is no such file, or not whole.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            names, metadata = file.keys(), file.metadata()
            return {name: file.get_tensor(name).clone() for name in names}, metadata or {}
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a safetensors file, or not whole: {error}") from error
