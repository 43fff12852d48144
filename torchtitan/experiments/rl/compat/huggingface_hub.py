"""huggingface_hub 1.33 and datasets 4.7: whether there is a hub, and work without one.

Both try again for a minute where the network has no hub. Both read HF_HUB_OFFLINE when they are imported, into a constant that
they look at from then on.
"""

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIMIT_S = 5.0


def hub_fault(limit_s: float = LIMIT_S) -> str | None:
    """Why the hub can't be asked, in one line; None: it answers."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=limit_s).close()
    except urllib.error.HTTPError:  # an answer
        return None
    except (OSError, ValueError) as error:
        return f"no hub answers at {constants.ENDPOINT}: {getattr(error, 'reason', None) or error}"
    return None


@contextmanager
def without_hub() -> Iterator[None]:
    """In the block both use what they have downloaded before, and ask nobody."""
    from huggingface_hub import constants

    both: list[Any] = [constants, *([sys.modules["datasets.config"]] if "datasets.config" in sys.modules else [])]
    before = [module.HF_HUB_OFFLINE for module in both]
    try:
        for module in both:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, offline in zip(both, before, strict=True):
            module.HF_HUB_OFFLINE = offline
