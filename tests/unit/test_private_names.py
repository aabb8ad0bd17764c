"""The private names of torch, TorchRL, pyzmq and asyncio that asyncsync touches: each stands in a module called
``…_private``, and in here with what breaks where it is not there any more. Those of TensorDict are methods, called
where they are needed."""

import pkgutil

import pytest
from torch import distributed, nn

import asyncsync
from asyncsync import collectors, transports
from asyncsync.transports import torch_private as transports_private
from helpers.collecting_single import needs_torchrl, torchrl

NAMES = {
    "asyncsync.weights.torch_private": {
        "torch:_foreach_copy_": "An update copies tensor by tensor, which takes twice as long.",
    },
    "asyncsync.model.torch_private": {
        "torch.nn:Module._call_impl": "The gate cannot tell when the forward ends that a hook belongs to.",
        "torch.nn:Module._compiled_call_impl": "A gate accepts modules that do not run its hooks, and Parameters whose "
        "addresses are in compiled code are given other memory.",
        "torch._dynamo.eval_frame:OptimizedModule": "The same; and a compiled trainer's names, which have its "
        "_orig_mod, do not fit an eager worker's model.",
        "torch._dynamo.utils:counters": "There is no warning of a module that was compiled before it was registered; "
        "nor without _torchdynamo_orig_callable of OptimizedModule.forward.",
        "torch.nn.utils.parametrize:_cache": "An update is not seen inside of parametrize.cached().",
    },
    "asyncsync.runtime.asyncio_private": {
        "asyncio:_get_running_loop": "A hold() takes a microsecond longer where no loop runs. Remedy: catch the "
        "RuntimeError of asyncio.get_running_loop."
    },
    "asyncsync.net.zmq_private": {
        "zmq.backend:Socket.get": "A small message costs three times as much. Remedy: the same methods of zmq.Socket.",
        "zmq.backend:Socket.recv": "The same.",
        "zmq.backend:Socket.send": "The same.",
        "zmq:Context._socket_class": "A bus that is forgotten is terminated before its sockets are closed, which waits "
        "for ever.",
        "zmq:Context.__del__": "The same.",
        "zmq:Socket.__del__": "The same.",
    },
    "asyncsync.collectors.distributed.rpc_private": {
        "torch.distributed.rpc:_init_rpc_backend": "An RPCCollector has to call rpc.init_rpc, which works once per "
        "process.",
        "torch.distributed.rpc:_is_current_rpc_agent_set": "The same.",
        "torch.distributed.rpc:_set_profiler_node_id": "The same.",
        "torch.distributed.autograd:_init": "The same.",
    },
    "asyncsync.transports.torch_private": {
        "torch.distributed:ProcessGroupGloo._Options": "Gloo listens where the host's name leads to, which is often a "
        "loopback address: its _timeout, _devices and _threads are set.",
        "torch.distributed.distributed_c10d:_get_default_store": "A scheme in a process group must be given "
        "store_info=.",
    },
    # Tried in a cluster by tests/schemes/test_called_schemes.py: ray._private.worker.global_worker.core_worker has
    # serialize_object_ref and deserialize_and_register_object_ref. Without them an object can be named in no message
    # but Ray's own; pickled by anybody else, it would be pinned for ever.
    "asyncsync.transports.ray_private": {},
    # LazyTensorStorage has _init_lock, _init_event and _make_init_directory(): see the last test.
    "asyncsync.collectors.multi.torchrl_private": {},
}


def test_every_module_of_private_names_is_in_here() -> None:
    found = set()
    for paths, prefix in (
        (asyncsync.__path__[:1], "asyncsync."),
        (collectors.__path__, "asyncsync.collectors."),
        (transports.__path__, "asyncsync.transports."),
    ):
        found |= {module.name for module in pkgutil.walk_packages(paths, prefix) if module.name.endswith("_private")}
    assert found == NAMES.keys()


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_a_name_is_there(name: str) -> None:
    pkgutil.resolve_name(name)


def test_a_module_has_its_parts_in_dictionaries() -> None:
    """Without them neither half of a strategy finds the tensors, nor where one is to be replaced; a refused buffer is
    not called non-persistent; and a gate counts a module twice that is attached twice."""
    tensors = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
    hooks = {"_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called"}
    assert tensors | hooks <= vars(nn.Linear(1, 1)).keys()


def test_a_process_group_has_a_store_by_which_its_processes_have_met() -> None:
    assert transports_private.default_store() is None
    distributed.init_process_group("gloo", store=(store := distributed.HashStore()), rank=0, world_size=1)
    try:
        store.set("known", "yes")
        assert transports_private.default_store() is not None
    finally:
        distributed.destroy_process_group()


@needs_torchrl
def test_a_lazy_storage_of_torchrls_can_be_made_by_the_process_that_writes_first() -> None:
    """Without these, a lazy storage that workers share needs ``shared_init=True``."""
    kind = torchrl().data.LazyTensorStorage
    assert hasattr(kind, "_make_init_directory")
    assert {"_init_lock", "_init_event"} <= {*kind.__init__.__code__.co_names}
