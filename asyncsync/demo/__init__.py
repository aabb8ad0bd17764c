"""``asyncsync demo``: PPO on CartPole-v1, which sends every update to the rollout workers through the bus.

Read :mod:`asyncsync.demo.trainer` first.

    trainer.py   the trainer and its policy: learn from a batch, send the weights
    workers.py   the collector: worker processes, each with a vector of environments
    record.py    the record of a run: the returns, and whether each action came from its version's weights
    run.py       the command: its screen, its summary and its exit code
"""
