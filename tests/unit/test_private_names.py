"""The private names of torch, TorchRL, pyzmq and asyncio that asyncsync touches: each stands in a module called
``…_private``, and in here with what breaks where it is not there any more. Those of TensorDict are methods, called
where they are needed."""

from __future__ import annotations

import asyncio
import gc
import inspect
import pkgutil
import threading

import pytest
import torch
import zmq
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import asyncsync
from asyncsync import collectors, transports
from asyncsync.collectors.distributed import rpc_private
from asyncsync.collectors.envs import gym_private
from asyncsync.collectors.multi import torchrl_private
from asyncsync.model import torch_private as model_private
from asyncsync.net import zmq_private
from asyncsync.runtime import asyncio_private
from asyncsync.transports import ray_private
from asyncsync.transports import torch_private as transports_private
from asyncsync.weights import torch_private as weights_private
from helpers.collecting_single import needs_torchrl, torchrl


def test_every_module_of_private_names_is_in_here() -> None:
    packages = (asyncsync.__path__[:1], collectors.__path__, transports.__path__)
    prefixes = ("asyncsync.", "asyncsync.collectors.", "asyncsync.transports.")
    walked = [
        each for paths, prefix in zip(packages, prefixes, strict=True) for each in pkgutil.walk_packages(paths, prefix)
    ]
    found = {module.name for module in walked if module.name.endswith("_private")}
    modules = (
        asyncio_private, gym_private, model_private, ray_private, rpc_private, torchrl_private, transports_private,
        weights_private, zmq_private,
    )  # fmt: skip
    assert found == {module.__name__ for module in modules}


def test_many_tensors_are_copied_by_one_call() -> None:
    """``torch._foreach_copy_``. Without it an update copies tensor by tensor, which takes twice as long."""
    destinations, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3, dtype=torch.int64)]
    weights_private.foreach_copy(destinations, sources)
    assert all(bool((tensor == 1).all()) for tensor in destinations)


def test_inference_mode_can_be_entered_without_its_decorators() -> None:
    """``torch._C._InferenceMode``. Remedy: ``torch.inference_mode()``, which takes three times as long."""
    with torch.inference_mode():
        model = torch.zeros(1)
    with weights_private.InferenceMode(True):
        model.fill_(1)
    assert model.item() == 1


def test_a_compiled_module_has_the_original_under_the_name_that_is_left_out_of_paths() -> None:
    """``OptimizedModule._orig_mod``. Without it a compiled trainer's names do not fit an eager worker's model."""
    module = nn.Linear(1, 1)
    compiled = torch.compile(module, backend="eager")
    assert getattr(compiled, weights_private.COMPILED) is module
    assert f"{weights_private.COMPILED}.weight" in compiled.state_dict()


def test_a_module_has_its_tensors_and_children_in_dictionaries() -> None:
    """``Module._parameters``, ``_buffers``, ``_modules``, ``_non_persistent_buffers_set``. Without them a strategy does
    not find the tensors, nor where one is to be replaced; ``named_parameters()`` takes three times as long."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    model[0].register_buffer("left", torch.zeros(1), persistent=False)
    parameters, buffers, children = model_private.tensors_and_children(model[0])
    assert (parameters["weight"], children) == (model[0].weight, {})
    assert buffers["running_mean"] is model[0].running_mean
    assert model_private.tensors_and_children(model)[2] == {"0": model[0]}
    assert model_private.non_persistent(model[0]) == {"left"}


def test_parametrizations_are_cached_in_a_dictionary() -> None:
    """``parametrize._cache``. Without it an update is not seen inside of ``parametrize.cached()``."""
    module = parametrizations.weight_norm(nn.Linear(2, 2))
    with parametrize.cached():
        before = module.weight
        assert module.weight is before
        model_private.forget_computed()
        assert module.weight is not before


def test_hooks_are_in_dictionaries_and_run_below_the_frame_of_call_impl() -> None:
    """``Module._forward_pre_hooks``, ``_forward_hooks``, ``_forward_hooks_always_called``, ``_call_impl``. Without them
    a gate counts a module twice that is attached twice, and cannot tell when a hook's forward ends."""
    module, found = nn.Linear(1, 1), []
    before = module.register_forward_pre_hook(lambda *_: found.extend(one.frame.f_code for one in inspect.stack(0)))
    after = module.register_forward_hook(lambda *_: None, always_call=True)
    pre_hooks, hooks, always_called = model_private.call_hooks(module)
    assert (list(pre_hooks), list(hooks), list(always_called)) == ([before.id], [after.id], [after.id])
    assert model_private.forward_hooks(module) is hooks
    module(torch.zeros(1, 1))
    assert found.count(model_private.CALL_IMPL) == 1


def test_what_was_compiled_can_be_told() -> None:
    """``torch._dynamo.eval_frame.OptimizedModule``, ``Module._compiled_call_impl``. Without them a gate accepts modules
    that do not run its hooks, and Parameters whose addresses are in compiled code are given other memory."""
    eager, itself = nn.Linear(1, 1), nn.Linear(1, 1)
    around = torch.compile(nn.Linear(1, 1), backend="eager")
    itself.compile(backend="eager")
    assert [model_private.is_compiled(each) for each in (eager, itself, around)] == [False, True, True]
    assert [model_private.is_optimized(each) for each in (eager, itself, around)] == [False, False, True]


def test_compiled_code_that_runs_no_hooks_can_be_found() -> None:
    """``torch._dynamo.utils.counters``, ``OptimizedModule.forward``, ``_torchdynamo_orig_callable``. Without them
    there is no warning of a module that was compiled before it was registered."""

    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    of_torch, own = nn.Linear(1, 1), Own()
    for module, has_hooks in ((of_torch, False), (own, True)):
        compiled = torch.compile(module, backend="eager")
        compiled(torch.zeros(1, 1))
        assert any(one is compiled and original is module for one, original in model_private.optimized_modules())
        assert model_private.wraps_as_it_is(compiled, module) is has_hooks
    assert model_private.has_compiled_anything()


async def test_the_running_loop_can_be_told_where_none_runs() -> None:
    """``asyncio._get_running_loop``. Remedy: catch the RuntimeError of ``asyncio.get_running_loop``."""
    assert asyncio_private.running_loop() is asyncio.get_running_loop()
    assert await asyncio.to_thread(asyncio_private.running_loop) is None


def test_sockets_are_used_below_their_options_and_enums() -> None:
    """``zmq.backend.Socket.get``, ``recv``, ``send``. Remedy: those of ``zmq.Socket``, at three times the cost."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.bind("inproc://private-names")
        b.connect("inproc://private-names")
        zmq_private.send(a, b"message", zmq.DONTWAIT)
        assert zmq_private.get(b, zmq.EVENTS) & zmq.POLLIN
        assert bytes(zmq_private.recv(b, zmq.DONTWAIT)) == b"message"


def test_the_garbage_collection_closes_neither_a_context_nor_its_sockets() -> None:
    """``Context._socket_class``, and that pyzmq ends both in their ``__del__``. Without it a bus that is forgotten is
    terminated before its sockets are closed, which waits for ever."""
    context = zmq_private.Context()
    socket = context.socket(zmq.PAIR)
    assert type(socket) is context._socket_class is zmq_private._Socket
    for ours, theirs in ((zmq_private.Context, zmq.Context), (zmq_private._Socket, zmq.Socket)):
        assert "__del__" in vars(theirs)
        assert vars(ours)["__del__"] is not vars(theirs)["__del__"]
    number = socket.underlying
    del socket
    gc.collect()
    forgotten = zmq.Socket(shadow=number)
    assert forgotten.get(zmq.TYPE) == zmq.PAIR, "it is open"
    forgotten.close(linger=0)
    context.destroy(linger=0)


def test_the_private_names_of_ray_are_tried_in_a_cluster() -> None:
    """``ray._private.worker.global_worker.core_worker``: ``serialize_object_ref`` and
    ``deserialize_and_register_object_ref``. Without them an object can be named in no message but Ray's own; pickled by
    anybody else, it would be pinned for ever. tests/schemes/test_called_schemes.py has the test."""
    assert {name for name in ray_private.__all__ if name != "the_ray"} == {"describe", "find"}


def test_an_rpc_agent_can_be_started_with_a_store_that_is_given() -> None:
    """``rpc._init_rpc_backend``, ``rpc._is_current_rpc_agent_set``, ``rpc._set_profiler_node_id`` and
    ``autograd._init``. Without them an RPCCollector has to call ``rpc.init_rpc``, which works once per process."""
    from torch.distributed import autograd, rpc

    assert not rpc_private.has_agent()
    for owner, name in ((rpc, "_init_rpc_backend"), (rpc, "_set_profiler_node_id"), (autograd, "_init")):
        assert callable(getattr(owner, name))
    parameters = inspect.signature(rpc._init_rpc_backend).parameters
    assert list(parameters)[:5] == ["backend", "store", "name", "rank", "world_size"]


def test_a_gloo_group_of_two_can_be_bound_to_an_address() -> None:
    """``ProcessGroupGloo._Options`` with ``_timeout``, ``_devices``, ``_threads``. Without them gloo listens where the
    host's name leads to, which is often a loopback address."""
    from torch.distributed import HashStore

    store, made = HashStore(), []
    other = threading.Thread(target=lambda: made.append(transports_private.gloo_pair(store, 1, "127.0.0.1", 10)))
    other.start()
    made.append(transports_private.gloo_pair(store, 0, "127.0.0.1", 10))
    other.join()
    assert [group.size() for group in made] == [2, 2]


def test_a_process_group_has_a_store_by_which_its_processes_have_met() -> None:
    """``distributed_c10d._get_default_store``. Without it a scheme in a process group must be given ``store_info=``."""
    from torch import distributed

    assert transports_private.default_store() is None
    distributed.init_process_group("gloo", store=(store := distributed.HashStore()), rank=0, world_size=1)
    try:
        store.set("known", "yes")
        assert transports_private.default_store() is not None
    finally:
        distributed.destroy_process_group()


def test_a_sync_vector_knows_which_environments_wait_for_a_reset() -> None:
    """``SyncVectorEnv._autoreset_envs``. Remedy: its own reset with a mask, which takes 45 µs more."""
    gymnasium = pytest.importorskip("gymnasium")
    vector = gymnasium.vector
    made = {"autoreset_mode": vector.AutoresetMode.DISABLED}
    env = gymnasium.make_vec("CartPole-v1", 2, "sync", vector_kwargs=made, max_episode_steps=1)
    env.reset()
    _, _, _, finished, _ = env.step(env.action_space.sample())
    assert finished.all()
    with pytest.raises(AssertionError):
        env.step(env.action_space.sample())
    assert [index for index, _ in gym_private.reset_these(env, finished)] == [0, 1]
    env.step(env.action_space.sample())
    env.close()


@needs_torchrl
def test_a_lazy_storage_of_torchrls_can_be_made_by_the_process_that_writes_first() -> None:
    """``LazyTensorStorage._init_lock``, ``._init_event``, ``._make_init_directory()``. Without them, a lazy storage
    that workers share needs ``shared_init=True``."""
    kind = torchrl().data.LazyTensorStorage
    assert hasattr(kind, "_make_init_directory")
    assert {"_init_lock", "_init_event"} <= {*kind.__init__.__code__.co_names}
