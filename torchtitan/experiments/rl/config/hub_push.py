"""Uploads a policy to the hub. The folder stays where it is, whatever the hub says."""

import shlex
import sys
from pathlib import Path

from torchtitan.experiments.rl.compat.huggingface_hub import push_folder
from torchtitan.experiments.rl.observability.console import write_line
from torchtitan.experiments.rl.printable import one_sentence, printable_line


def push(folder: Path, name: str) -> bool:
    """Upload ``folder`` to the model ``name``, and say so. Returns whether it is there; a line says how to try again."""
    write_line(sys.stdout, printable_line(f"pushing     {folder} to {name}"))
    try:
        url = push_folder(folder, name)
    except Exception as error:  # the hub, the network and the disk raise types of their own
        again = f"hf upload {shlex.quote(name)} {shlex.quote(str(folder))}"
        cause = one_sentence(f"{type(error).__name__}: {error}")
        write_line(sys.stderr, printable_line(f"error: {name} was not pushed ({cause}); the policy is saved; again: {again}"))
        return False
    write_line(sys.stdout, printable_line(f"pushed      {url}"))
    return True
