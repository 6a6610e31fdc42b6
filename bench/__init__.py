"""Benchmarks of Perdure against bare Postgres commits and against DBOS, on one machine, in one run.

``python -m bench`` starts a Postgres of its own (fsync on), the real gateway, sidecars and agents as processes, and drives them over
loopback. What is compared is measured in turns (A B A B), so that a slow minute of the machine hits all of them; what counts are the
ratios.

    stage.py      what everything runs on: the server, its databases, the gateway
    meter.py      CPU of each part, and of everybody else on the machine
    pod.py        a worker pod as the gateway sees it
    variants/     one thing to measure a file
    rounds.py     the turns
    aims.py       what the figures should be
    report.py     table and JSON
"""
