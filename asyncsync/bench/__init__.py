"""``asyncsync bench``: which scheme to take on this machine.

    asyncsync bench                                     # two workers, weights of 64 KiB and of 16 MiB
    asyncsync bench --workers 4 --size 1MiB --reach network

:mod:`asyncsync.bench.measure` starts the workers and sends updates to them over one scheme after the other;
:mod:`asyncsync.bench.advice` prints the table and names the scheme to take. Only public names of asyncsync are used
here, so that the command measures what a program gets. Comparisons with other libraries are in the repository's
``benchmarks/``.
"""
