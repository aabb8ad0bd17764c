"""``asyncsync bench``: find out which scheme to use on this machine.

    asyncsync bench                                     # two workers, weights of 64 KiB and of 16 MiB
    asyncsync bench --workers 4 --size 1MiB --reach network

:mod:`asyncsync.bench.measure` starts the workers, and sends updates to them over one scheme after the other. It uses
only public names of asyncsync, so it measures what a program gets. :mod:`asyncsync.bench.advice` prints the table and
names the best scheme. Comparisons with other libraries are in the repository's ``benchmarks/``.
"""
