"""Reads how long user code blocked the event loop, from its error: a busy machine adds to a sleep, and takes nothing off."""

import re


def blocked_s(error: object) -> float:
    found = re.search(r"blocked the event loop for ([\d.]+) s", str(error))
    assert found, error
    return float(found[1])
