"""Reads how long user code blocked the event loop, from its error.

A busy machine adds to a sleep and takes nothing off. The measurement begins at the next tick of the
loop (`ask/lag.py`), so it may be shorter than the sleep by a tick.
"""

import re


def blocked_s(error: object) -> float:
    found = re.search(r"blocked the event loop for ([\d.]+) s", str(error))
    assert found, error
    return float(found[1])
