"""What a run left behind, and what it means: names, the run bundle, SLOs, outcomes, statistics.

Everything here is a plain function over a run bundle, or the wiring (spans, receiver) that fills one.
It imports ``models`` only; ``engine``, ``loadgen`` and ``dashboards`` build on it.
"""
