"""tyro 1.0.17: the one sentence in the box of lines it prints about a wrong command line.

``tyro.cli`` prints the box and exits. With ``console_outputs=False`` it prints nothing, and its hook for errors is private and
documented as unstable, so the text is read here.
"""


def error_message(printed: str) -> str:
    """The sentence in tyro's box, and what tyro thinks was meant."""
    lines = [line.strip().strip("│").strip() for line in printed.splitlines()]
    if not lines[0].startswith("╭"):  # no UTF-8 here: a blank for the border, and a rule under the title
        lines = lines[next(i for i, line in enumerate(lines) if _is_rule(line)) + 1 :]
    lines = [line for line in lines if line and not line.startswith(("╭", "╰"))]
    end = next((i for i, line in enumerate(lines) if _is_rule(line)), len(lines))
    message = " ".join(lines[:end])
    for i, line in enumerate(lines):
        if line.startswith("Perhaps you meant") and i + 1 < len(lines):
            return f"{message}; perhaps you meant {lines[i + 1].split()[0]}"
    return message


def _is_rule(line: str) -> bool:
    return len(line) > 1 and set(line) <= set("─-")
