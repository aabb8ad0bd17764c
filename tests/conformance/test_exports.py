"""The names that the two packages have; what they do is shown elsewhere."""

from __future__ import annotations

import inspect
import pickle
from types import ModuleType

import pytest

import asyncsync
import asyncsync.sync
from asyncsync import errors

SCHEMES = ["WeightSyncScheme", "MultiProcessWeightSyncScheme", "SharedMemWeightSyncScheme", "NoWeightSyncScheme"]
TRANSPORTS = ["TransportBackend", "MPTransport", "SharedMemTransport"]
ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]


@pytest.mark.parametrize("package", [asyncsync, asyncsync.sync], ids=["asyncsync", "asyncsync.sync"])
def test_r049_r050_r209_both_packages_have_the_documented_names(package: ModuleType) -> None:
    """Of 49, 50 and 209: what needs no torch.distributed, RPC or Ray."""
    for names, base in ((SCHEMES, package.WeightSyncScheme), (TRANSPORTS, package.TransportBackend)):
        for name in names:
            assert name in package.__all__
            assert issubclass(getattr(package, name), base), name
    assert "WeightStrategy" in package.__all__
    assert package.WeightStrategy is asyncsync.WeightStrategy


@pytest.mark.parametrize("package", [asyncsync, asyncsync.sync], ids=["asyncsync", "asyncsync.sync"])
def test_each_class_shows_the_name_that_users_import_and_pickles(package: ModuleType) -> None:
    for name in package.__all__:
        if inspect.isclass(value := getattr(package, name)):
            assert (value.__name__, value.__qualname__) == (name, name)
            assert pickle.loads(pickle.dumps(value)) is value


@pytest.mark.parametrize("package", [asyncsync, asyncsync.sync], ids=["asyncsync", "asyncsync.sync"])
def test_r209_both_packages_have_the_same_errors(package: ModuleType) -> None:
    """Of 209: who catches the one's errors catches the other's."""
    assert len(ERRORS) >= 10
    for name in ERRORS:
        assert name in package.__all__
        assert getattr(package, name) is getattr(errors, name)
