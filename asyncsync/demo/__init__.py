"""``asyncsync demo``: PPO on CartPole-v1, every update sent to the rollout workers through the bus.

Read :mod:`asyncsync.demo.trainer` first.

    trainer.py   the trainer and its policy: learn from a batch, send the weights
    workers.py   the collector: worker processes, each with a vector of environments
    record.py    what happened: the returns, and whether the weights followed
    run.py       the command: what it shows, its summary and its exit code
"""
