"""The demonstration: PPO on CartPole-v1, every update sent to the rollout workers through the bus.

Read :mod:`asyncsync.demo.trainer` first; ``asyncsync demo`` runs it.

    trainer.py   the trainer and its policy: learn from a batch, send the weights
    workers.py   the collector: worker processes, each with a vector of environments
    record.py    what happened, for the view, the summary and the plot
    view.py      the live terminal view, or plain lines
    plot.py      the picture at the end
    options.py   what the command line says
    run.py       the command: Ctrl-C, exit codes
"""
