"""The names that the two packages have; what they do is shown elsewhere."""

import inspect
import pickle
from types import ModuleType

import pytest

import asyncsync
import asyncsync.collectors
import asyncsync.sync
import asyncsync.transports
from asyncsync import errors

SCHEMES = [
    "WeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "NoWeightSyncScheme",
    "RayWeightSyncScheme",
    "RayModuleTransformScheme",
    "RPCWeightSyncScheme",
    "DistributedWeightSyncScheme",
]
TRANSPORTS = [
    "TransportBackend",
    "MPTransport",
    "SharedMemTransport",
    "RayTransport",
    "RPCTransport",
    "DistributedTransport",
]
ERRORS = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]


@pytest.mark.requirement(49, 50, 209, 225, 228)
@pytest.mark.parametrize(
    ("package", "names", "base"),
    [
        *[(package, SCHEMES, package.WeightSyncScheme) for package in (asyncsync, asyncsync.sync)],
        *[(package, TRANSPORTS, package.TransportBackend) for package in (asyncsync, asyncsync.sync)],
        *[(package, ERRORS, Exception) for package in (asyncsync, asyncsync.sync)],
        (asyncsync, ["WeightStrategy"], asyncsync.WeightStrategy),
        (asyncsync.sync, ["WeightStrategy"], asyncsync.WeightStrategy),
        (asyncsync.transports, [*TRANSPORTS, "ZMQTransport"], asyncsync.TransportBackend),
        (asyncsync.collectors, ["Evaluator", "ProfileConfig"], object),
    ],
)
def test_packages_have_the_documented_names(package: ModuleType, names: list[str], base: type) -> None:
    """The errors are the same in both APIs: what catches the one's catches the other's."""
    assert len(names) > 0
    for name in names:
        assert name in package.__all__
        assert issubclass(getattr(package, name), base), name
        if base is Exception:
            assert getattr(package, name) is getattr(errors, name)


def test_a_transport_at_hand_without_descriptors_is_told_what_to_define() -> None:
    class AtHand(asyncsync.ZMQTransport):
        is_at_hand = True

    with pytest.raises(NotImplementedError, match=r"AtHand must define describe\(slab\)"):
        AtHand().describe(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", [asyncsync, asyncsync.sync], ids=["asyncsync", "asyncsync.sync"])
def test_each_class_shows_the_name_that_users_import_and_pickles(package: ModuleType) -> None:
    for name in package.__all__:
        if inspect.isclass(value := getattr(package, name)):
            assert (value.__name__, value.__qualname__) == (name, name)
            assert pickle.loads(pickle.dumps(value)) is value
