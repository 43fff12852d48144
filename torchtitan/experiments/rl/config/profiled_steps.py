"""Reads ``--profile-steps``."""

import re

from torchtitan.experiments.rl.errors import ConfigError


def profiled_steps(value: str) -> range | None:
    """The optimizer steps that "A:B" names, both included; None for "".

    Raises:
        ConfigError: it is no such pair.
    """
    if not value:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", value)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ConfigError("profile_steps", value, "write the first and the last step to record, such as 3:5")
    return range(int(found[1]), int(found[2]) + 1)
