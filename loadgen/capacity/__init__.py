"""`tailspan capacity`: the highest rate that holds an SLO, what it costs, and what binds it.

search     which rate comes next: a function of the points so far, so that a search can be resumed
point      one run, judged as a point of the search
probe      what runs a rate: a server (``server``), or the engine's twin in virtual time (``virtual``)
growth     when to end a run that is lost already
group      the folder of a search: its state file and its runs
answer     the result of a search: goodput, users, floor, money
sweep      one search for each value of a knob: the latency-cost frontier
"""
