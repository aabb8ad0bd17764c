"""Read and write safetensors files. They hold tensors and text but no code. A file is written whole or not at all.

Tied weights are written once for each name, because the format forbids shared bytes. The safetensors package is
optional: the caller must have checked that it is installed.
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
    """Write a file, whole or not at all. An older file of this name stays until all bytes are on the disk.

    Args:
        path: of the file.
        tensors: dense tensors on the CPU, by name.
        metadata: text to store with them.

    Raises:
        ValueError: the format cannot store such a dtype or name, or the header is too large. Nothing was written.
        OSError: the file cannot be written. Nothing is left behind.
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
    # The new file is written in a hidden directory beside the old one. It is locked, so that remove_half_written() does
    # not remove it.
    hidden = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    hidden.mkdir()
    try:
        with _opened(hidden) as directory:
            with suppress(OSError):  # where a file system has no locks, remove_half_written removes nothing
                fcntl.flock(directory, fcntl.LOCK_EX)
            try:
                save_file(own, hidden / path.name, dict(metadata))
            except KeyError as error:
                raise ValueError(f"safetensors files have no {error}") from error
            except SafetensorError as error:
                raise (OSError if "I/O" in str(error) else ValueError)(f"{path}: {error}") from error
            with _opened(hidden / path.name) as file:
                os.fsync(file)
            os.replace(hidden / path.name, path)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    # Make sure that the file's new name survives a crash of the machine, too.
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
    """Remove the hidden directories of processes that were killed while they wrote this file."""
    for hidden in path.parent.glob(f".{escape(path.name[:200])}.????????"):
        # OSError: a writer holds the lock, or has finished in the meantime.
        with suppress(OSError), _opened(hidden) as directory:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(hidden)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return copies of the tensors of a file, by name, and its metadata.

    Raises:
        ValueError: this is no safetensors file, or only a part of one.
        OSError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            names, metadata = file.keys(), file.metadata()
            return {name: file.get_tensor(name).clone() for name in names}, metadata or {}
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
