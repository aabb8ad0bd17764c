"""``asyncsync bench``: what an update costs on this machine, beside its peers in the same run.

    asyncsync bench                          # six minutes at most; tables, and the bars with yes or NO
    asyncsync bench --quick                  # without 256 MiB, and fewer trials
    asyncsync bench --only latency,stall     # some sections
    asyncsync bench --check                  # exit code 1 if a bar is missed

One process tree: the trainer (this process), two workers, and gloo's sender; afterwards four workers, and
TorchRL's sender with four of its own. Trials are interleaved, one of each system in turn, so that whatever else the
machine does hits all of them alike. Where things are:

    cases.py      payloads, sections and how often each is tried
    run.py        the command, from options to exit code
    sections.py   what each section measures, in the trainer; onehost.py: those beside TorchRL; stage.py: for both
    ours.py       asyncsync's side of it; peers.py: gloo, bare zmq.asyncio, memcpy; theirs.py: TorchRL
    crew.py       starts the processes and gives them orders; worker.py: obeys them; pipe.py: between the two
    meters.py     the event loop's stalls, a process's peak memory
    figures.py    statistics, and the bars: pure functions
    report.py     tables, JSON; plot.py: the picture
"""
