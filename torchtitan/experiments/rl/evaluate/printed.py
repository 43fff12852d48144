"""The result of an evaluation as lines of text, at most 80 columns but for names."""

from typing import Any


def result_lines(result: dict[str, Any]) -> list[str]:
    """Of what ``--json`` prints."""
    lines: list[str] = []
    for model in result["models"]:
        lines.append(f"model       {model['model']}")
        for task, figures in model["tasks"].items():
            failed = f", {figures['failed']} attempts failed" if figures["failed"] else ""
            lines.append(
                f"{task:<12}{figures['examples']} examples, {figures['attempts']} attempts at temperature "
                f"{figures['temperature']:g}{failed}"
            )
            lines += _estimates(figures, indent=12)
            for field, parts in figures["slices"].items():
                for value, part in parts.items():
                    lines.append(f"{'':<12}{field} = {value} ({part['examples']})")
                    lines += _estimates(part, indent=14)
        lines.append(f"records     {model['folder']}")
    for task, compared in (result["comparison"] or {}).items():
        if compared["difference"] is None:
            lines.append(f"compared    {task}: no example was scored for both")
            continue
        between = "" if compared["low"] is None else f" ({compared['low']:+.3f} to {compared['high']:+.3f})"
        lines.append(
            f"compared    {task}: second less first {compared['difference']:+.3f}{between}, p = {compared['p_value']:.3g}; "
            f"{len(compared['won'])} of {compared['examples']} examples better, {len(compared['lost'])} worse"
        )
    return [*lines, "Intervals are of 95 %, over examples."]


def _estimates(figures: dict[str, Any], *, indent: int) -> list[str]:
    lines = []
    for name, value in figures.items():
        if isinstance(value, dict) and "value" in value:
            if value["value"] is None:
                lines.append(f"{'':<{indent}}{name:<9}nothing was scored")
            else:
                between = "" if value["low"] is None else f"  ({value['low']:.3f} to {value['high']:.3f})"
                lines.append(f"{'':<{indent}}{name:<9}{value['value']:.3f}{between}")
    return lines
