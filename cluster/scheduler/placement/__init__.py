"""How the scheduler places a request: filter, score, pick, bind.

A gateway's `Place` message comes to `GlobalScheduler.place`, and `Admission.ask` answers it:

    admission.py    drives the stages; who finds nothing good now waits in its queue, or is told when to come back
    filter.py       1. all workers: who could take it at all, how soon its prompt would be computed there; a shortlist
    split.py        1. the points at which the shortlist's pairs may share a prompt
    score.py        2. each candidate pair: first token, time between tokens, what others lose; its gain in met targets
    tpot_forecast.py   of 2: who decodes on a worker now and later, and how long the steps take with one more
    pick.py         3. the candidates in order, and whether the best is good enough, or when it would be; the table that
                       operators read
    ledger.py       4. bind: booked on its workers at once, corrected by what workers and gateways report
    retry_after.py  where nothing is good now: when a client is asked to come back (and every constant of that)

What the stages read: `policy.py`, the rules; `worker_table.py`, all workers as arrays; `estimates.py`, what was learned
of outputs, overheads and demand; `coming_prefixes.py`, what prompts in queues leave to those behind them. `recovery.py`
books requests that somebody else placed: a scheduler before this one, or a gateway alone.

Nothing here knows sockets or Ray, and the clock is always passed in.
"""
