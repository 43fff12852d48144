"""The files of the pages."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("charts.js", "pages.js", "evaluations.js", "rollouts.js", "report.js")
"""In the order that they are loaded in."""
SERVED = {
    "/": ("page.html", "text/html"),
    "/report.css": ("report.css", "text/css"),
    **{f"/{name}": (name, "text/javascript") for name in SCRIPTS},
}
"""Name and type, by address."""
