"""``asyncsync bench``: which scheme to take on this machine.

    asyncsync bench                                     # two workers, weights of 64 KiB and of 16 MiB
    asyncsync bench --workers 4 --size 1MiB --reach network

:mod:`asyncsync.bench.measure` starts the workers, and sends updates to them over one scheme after the other by public
names of asyncsync only, so that the command measures what a program gets; :mod:`asyncsync.bench.advice` prints the
table and names the scheme to take. Comparisons with other libraries are in the repository's ``benchmarks/``.
"""
