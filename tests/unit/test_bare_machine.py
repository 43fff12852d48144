"""What `tests/bare_machine.py` hands to the systems that it makes. As root, in ``make test-all``, it makes them."""

import re
from pathlib import Path

import pytest

from tests import bare_machine

ROOT = Path(__file__).resolve().parents[2]


def test_the_packages_of_readme_are_explained_on_the_page():
    packages = bare_machine.readme_packages().split()[2:]
    page = (ROOT / "docs/install.md").read_text()
    explained = re.findall(
        r"`([\w+-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    )
    assert "libnuma1" in packages and set(packages) <= set(explained)


def test_pip_is_told_what_files_and_environment_tell_it_here(monkeypatch, tmp_path):
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\ntimeout = 7\nextra-index-url =\n    file:///a/simple\n    file:///b/simple\n[install]\nretries = 3\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_TIMEOUT", "9")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    told = bare_machine.pip_settings()
    assert (told["timeout"], told["retries"]) == ("9", "3")
    assert told["extra-index-url"] == "file:///a/simple file:///b/simple"


def test_files_and_folders_that_settings_name_are_handed_over_with_what_an_index_links_to(tmp_path):
    certificate, wheels, index = tmp_path / "ca.crt", tmp_path / "wheels", tmp_path / "index/simple"
    certificate.write_text("")
    wheels.mkdir()
    index.mkdir(parents=True)
    values = [
        str(certificate),
        f"file://{index} https://index.example/simple",
        f"{wheels} /not/there",
        "180",
        "wheels",
    ]
    assert bare_machine.named_paths(values) == {certificate, wheels, index.parent}


@pytest.mark.parametrize(
    "user, absent, line",
    [
        (1000, "", "needs root: run it with sudo"),
        (0, "debootstrap", "needs debootstrap: apt-get install debootstrap"),
        (0, "unshare", "needs unshare: apt-get install util-linux"),
        (0, "nothing", None),
    ],
)
def test_what_the_script_needs_is_one_line(monkeypatch, user, absent, line):
    monkeypatch.setattr(bare_machine.os, "geteuid", lambda: user)
    monkeypatch.setattr(bare_machine.shutil, "which", lambda name: None if name == absent else name)
    lack = bare_machine.what_is_lacking()
    assert lack is None if line is None else lack.endswith(line) and "\n" not in lack
