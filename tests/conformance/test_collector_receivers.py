"""A collector that receives: registering schemes, taking weights in, and passing them on downwards."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tensordict import TensorDict

from asyncsync import sync
from asyncsync.errors import AckTimeout, ClosedError, PartialSendError, RemoteError
from helpers.collecting_weights import VALUE, Readings, Stepping, connected, passed_on, update
from helpers.pairs import Clock, Model, fill, read


def schemes(*models: str) -> dict[str, Any]:
    return {model_id: sync.ZMQWeightSyncScheme() for model_id in models or ("policy",)}


# -- receive_weights --------------------------------------------------------------------------------------------------


def test_r159_without_schemes_it_mirrors_the_registered_policy() -> None:
    leaf = Readings(1)
    fill(leaf.policy, 4)
    leaf.receive_weights()
    assert leaf.step() == ({1, 4}, 1)


@pytest.mark.parametrize("given", ["positional", "weights", "policy", "a dict"])
def test_r160_it_applies_what_is_given(given: str) -> None:
    leaf, source = Readings(1), Model(7)
    if given == "positional":
        leaf.receive_weights(source)
    elif given == "weights":
        leaf.receive_weights(weights=TensorDict.from_module(source).data)
    elif given == "policy":
        leaf.receive_weights(policy=source)
    else:
        leaf.receive_weights(source.state_dict())
    assert read(leaf.policy) == {7}


def test_r161_several_sources_conflict() -> None:
    leaf = Readings(1)
    for arguments in ({"weights": Model(2), "policy": Model(2)}, {"weights": Model(2)}, {"policy": Model(2)}):
        positional = [Model(3)] if len(arguments) == 1 else []
        with pytest.raises(ValueError, match="exclude each other"):
            leaf.receive_weights(*positional, **arguments)
    assert read(leaf.policy) == {1}


def test_r159_r162_with_schemes_it_takes_in_what_they_have() -> None:
    top, leaf = Readings(1, schemes=schemes(), workers=1), Readings(worker_idx=0)
    with connected(top, [leaf]):
        with Clock(2.0):
            leaf.receive_weights()  # never waits for more
        top.update_policy_weights_(Model(2))
        leaf.receive_weights()
        assert read(leaf.policy) == {2}
        for given in ({"weights": Model(3)}, {"policy": Model(3)}):
            with pytest.raises(ValueError, match="receives \\['policy'\\] by weight_recv_schemes"):
                leaf.receive_weights(**given)
        with pytest.raises(ValueError, match="without arguments"):
            leaf.receive_weights(Model(3))
        with pytest.raises(ValueError, match="nobody is below it: update it where it is sent"):
            leaf.update_policy_weights_(Model(3))
        assert read(leaf.policy) == {2}


def test_r159_updates_that_wait_to_be_received_are_applied_by_it() -> None:
    top, leaf = Readings(1, schemes=schemes(), workers=1), Readings(worker_idx=0)
    given = passed_on(top)
    given["policy"].init_on_receiver("policy", leaf, apply="on_receive")
    thread = threading.Thread(target=leaf.register_scheme_receiver, args=(given,))
    thread.start()
    try:
        top._connect_senders(10)
        thread.join(10)
        top._bus.publish({"policy": Model(2)})  # type: ignore[union-attr]
        with pytest.raises(AckTimeout):
            leaf._await_version(2, 0.2)
        assert read(leaf.policy) == {1}
        with Clock(5.0):
            while read(leaf.policy) != {2}:
                leaf._receive_weights_scheme()
    finally:
        leaf.shutdown()
        top.shutdown()


def test_receive_weights_says_when_nothing_more_will_come() -> None:
    top, leaf = Readings(1, schemes=schemes(), workers=1), Readings(worker_idx=0)
    with connected(top, [leaf]):
        top.shutdown()
        with Clock(5.0):
            while not leaf._receiver_schemes["policy"].closed:
                pass
        with pytest.raises(ClosedError):
            leaf.receive_weights()
        assert leaf.step()[0] == {1, -1}, "it goes on with what it has"


# -- register_scheme_receiver -----------------------------------------------------------------------------------------


def test_r163_registering_initialises_and_synchronizes_at_once() -> None:
    top, leaf = Readings(3, schemes=schemes("policy", VALUE), workers=1), Readings(worker_idx=0)
    assert leaf._receiver_schemes == {}
    with connected(top, [leaf]):
        assert set(leaf._receiver_schemes) == {"policy", VALUE}
        for model_id, scheme in leaf._receiver_schemes.items():
            assert (scheme.model_id, scheme.worker_idx, scheme.context) == (model_id, 0, leaf)
        assert leaf.step() == ({3}, leaf._newest_version())
        with pytest.raises(ValueError, match="being received already"):
            leaf.register_scheme_receiver(schemes())


def test_r163_synchronize_weights_false_leaves_connecting_to_the_caller() -> None:
    top, leaf = Readings(3, schemes=schemes(), workers=1), Readings(worker_idx=0)
    leaf.register_scheme_receiver(passed_on(top), synchronize_weights=False)
    assert read(leaf.policy) == {-1}
    thread = threading.Thread(target=leaf._receiver_schemes["policy"].connect)
    thread.start()
    top._connect_senders(10)
    thread.join(10)
    assert read(leaf.policy) == {3}
    leaf.shutdown()
    top.shutdown()


def test_r163_who_does_not_know_which_worker_it_is_cannot_receive() -> None:
    leaf = Readings()
    with pytest.raises(RuntimeError, match=r"worker_idx has not been set.*Pass worker_idx="):
        leaf.register_scheme_receiver(schemes())
    with pytest.raises(TypeError, match="weight_recv_schemes"):
        leaf.register_scheme_receiver({"policy": "shared"})
    with pytest.raises(RuntimeError, match="has no receiver schemes"):
        leaf._receive_weights_scheme()
    assert leaf._receiver_schemes == {}


def test_r163_all_schemes_are_registered_or_none() -> None:
    leaf = Readings(worker_idx=0)
    given = {"policy": sync.ZMQWeightSyncScheme(), "env.nope": sync.ZMQWeightSyncScheme()}
    with pytest.raises(ValueError, match=r"env\.nope"):
        leaf.register_scheme_receiver(given, synchronize_weights=False)
    assert leaf._receiver_schemes == {}
    assert [scheme._role for scheme in given.values()] == [None, None]
    leaf.register_scheme_receiver({VALUE: given["policy"]}, synchronize_weights=False)
    leaf.shutdown()


def test_a_scheme_that_moves_nothing_is_received_at_once() -> None:
    leaf = Readings(1, worker_idx=0)
    leaf.register_scheme_receiver({"policy": sync.NoWeightSyncScheme()})
    leaf.receive_weights()
    assert leaf.step() == ({1, -1} if read(leaf.env.transform[0].module) == {-1} else {1}, 0)
    leaf.shutdown()


# -- further down -----------------------------------------------------------------------------------------------------


class Chain:
    """A trainer, a collector in the middle, and two leaves below that."""

    def __init__(self, *below: str) -> None:
        self.top = Readings(1, schemes=schemes("policy", VALUE), workers=1)
        self.middle = Readings(worker_idx=0, schemes=schemes(*below), workers=2)
        self.leaves = [Readings(worker_idx=i) for i in range(2)]


@pytest.mark.parametrize("style", ["blocking", "async"])
def test_r026_r074_r164_an_update_has_reached_the_leaves_when_it_returns(style: str) -> None:
    chain = Chain("policy", VALUE)
    with connected(chain.middle, chain.leaves), connected(chain.top, [chain.middle]):
        assert [read(leaf.policy) for leaf in chain.leaves] == [{1}, {1}], "the initial weights, too"
        for value in (2, 3):
            update(chain.top, style, Model(value))
            assert [read(each.policy) for each in (chain.middle, *chain.leaves)] == [{value}] * 3
        assert chain.middle.cascades
        assert not chain.leaves[0].cascades


def test_r026_r164_r199_several_models_stay_one_update_all_the_way_down() -> None:
    chain = Chain("policy", VALUE)
    with connected(chain.middle, chain.leaves), connected(chain.top, [chain.middle]):
        chain.top.update_policy_weights_(weights_dict={"policy": Model(10), VALUE: Model(10)})
        with Stepping(chain.leaves[0]) as one, Stepping(chain.middle) as middle:
            for value in range(11, 19):
                chain.top.update_policy_weights_(weights_dict={"policy": Model(value), VALUE: Model(value)})
        assert {len(values) for values, _ in one.found | middle.found} == {1}
        assert chain.leaves[1].step()[0] == {18}


def test_r164_a_model_that_only_the_middle_has_ends_there() -> None:
    chain = Chain("policy")
    with connected(chain.middle, chain.leaves), connected(chain.top, [chain.middle]):
        chain.top.update_policy_weights_(weights_dict={"policy": Model(5), VALUE: Model(6)})
        chain.top.update_policy_weights_(Model(7), model_id=VALUE)
        assert chain.middle.step()[0] == {5, 7}
        assert [leaf.step()[0] for leaf in chain.leaves] == [{5, -1}, {5, -1}]


def test_r074_r164_a_leaf_that_is_lost_below_fails_the_update_above() -> None:
    chain = Chain("policy")
    with connected(chain.middle, chain.leaves), connected(chain.top, [chain.middle]):
        chain.leaves[1].shutdown()
        with pytest.raises(PartialSendError) as caught:
            chain.top.update_policy_weights_(Model(5), timeout=20)
        failure = caught.value.failed[0]
        assert isinstance(failure, RemoteError)
        assert "worker 1: PeerLost" in str(failure)
        assert read(chain.leaves[0].policy) == {5}


def test_r074_whether_it_is_passed_on_is_asked_for_each_update() -> None:
    top, middle, leaf = Readings(1, schemes=schemes(), workers=1), Readings(worker_idx=0), Readings(worker_idx=0)
    with connected(top, [middle]):
        top.update_policy_weights_(Model(2))
        assert read(middle.policy) == {2}
        middle._set_up_senders(schemes(), None, num_workers=1)
        with connected(middle, [leaf]):
            assert read(leaf.policy) == {2}
            top.update_policy_weights_(Model(3))
            assert read(leaf.policy) == {3}


# -- around a step ----------------------------------------------------------------------------------------------------


def test_r158_weights_change_between_two_steps_and_waiting_for_a_version_ends_with_it() -> None:
    top, leaf = Readings(1, schemes=schemes(), workers=1), Readings(worker_idx=0)
    with connected(top, [leaf]):
        with leaf._holds():
            before = leaf._version_now()
            top._bus.publish({"policy": Model(2)})  # type: ignore[union-attr]
            with Clock(5.0):
                while leaf._newest_version() == before:
                    pass
            assert (read(leaf.policy), leaf._version_now()) == ({1}, before)
        leaf._await_version(before + 1, 10)
        assert (read(leaf.policy), leaf._version_now()) == ({2}, before + 1)
        with pytest.raises(AckTimeout):
            leaf._await_version(before + 2, 0.05)
        leaf._newest = lambda: 99
        assert leaf._newest_version() == 99
