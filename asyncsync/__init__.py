"""Delivers the weights of a model in training to every process that runs a copy of it, over asyncio and ZeroMQ.

Importing this package starts no thread, process, socket or event loop, and needs none of the optional libraries. The
first use of a public name imports all of :mod:`asyncsync.public`, and torch.
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from pathlib import Path as _Path
from typing import TYPE_CHECKING

import numpy as _numpy  # noqa: F401  # before torch: torch swallows a Ctrl-C that strikes while it imports numpy

# Installed, `asyncsync.transports` and `asyncsync.collectors` lie in this directory. In a checkout they lie beside it,
# so the parent is searched, too. Not if the parent is site-packages: another project may have a `transports` there.
_checkout = _Path(__file__).resolve().parent.parent
if all((_checkout / name).is_file() for name in ("pyproject.toml", "transports/__init__.py", "collectors/__init__.py")):
    __path__.append(str(_checkout))
del _checkout

try:
    __version__ = _version("asyncsync")
except _PackageNotFoundError:  # a checkout on PYTHONPATH, never installed
    __version__ = "0+unknown"

if TYPE_CHECKING:
    from asyncsync.errors import *  # noqa: F403
    from asyncsync.public import *  # noqa: F403
else:  # hidden from type checkers, because a __getattr__ makes them accept any name

    def __getattr__(name):
        public = _import_module("asyncsync.public")
        names = {each: getattr(public, each) for each in public.__all__}
        globals().update(names, __all__=["__version__", *names])
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
