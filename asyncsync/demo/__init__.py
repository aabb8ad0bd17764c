"""The demonstration: PPO on CartPole-v1, every update sent to the rollout workers through the bus.

Read :mod:`asyncsync.demo.trainer` first, then :mod:`asyncsync.demo.worker`; ``asyncsync demo`` runs them.

    trainer.py   the trainer: learn from a batch, publish the weights
    worker.py    a rollout worker: one event loop, one policy that is never torn
    crew.py      starts and ends the worker processes, brings their batches
    record.py    what happened, for the view, the summary and the plot
    view.py      the live terminal view, or plain lines
    plot.py      the picture at the end
    run.py       the command: options, Ctrl-C, exit codes
"""
