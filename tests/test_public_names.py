"""The package's public names, and the README against the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import specdiff_dist
from specdiff_dist.config import TIERS
from specdiff_dist.quality import rule_name

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_all_is_sorted_and_every_name_resolves():
    assert specdiff_dist.__all__ == sorted(specdiff_dist.__all__)
    for name in specdiff_dist.__all__:
        assert getattr(specdiff_dist, name).__name__ == name
        assert name in dir(specdiff_dist)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = specdiff_dist.nope


def tree_of_readme() -> dict[str, str]:
    """Path -> its line's text, from the fenced tree of the README."""
    block = README.partition("<!-- file tree -->\n```text\n")[2].partition("\n```")[0]
    entries: dict[str, str] = {}
    folders: list[tuple[int, str]] = []
    for line in block.splitlines():
        indent = len(line) - len(line.lstrip())
        name, _, text = line.strip().partition(" ")
        while folders and folders[-1][0] >= indent:
            folders.pop()
        parent = folders[-1][1] if folders else ""
        path = f"{parent}{name}"
        entries[path] = text.strip()
        if name.endswith("/"):
            folders.append((indent, path))
    return entries


def test_the_tree_of_the_readme_is_the_tree():
    entries = tree_of_readme()
    assert entries, "README.md has no tree under <!-- file tree -->"
    for path, text in entries.items():
        target = ROOT / path
        assert target.is_dir() if path.endswith("/") else target.is_file(), f"{path} is in the README only"
        assert text, f"{path} has no line of explanation"


@pytest.mark.parametrize("top", ["deployments", "specdiff_dist"])
def test_every_module_is_in_the_tree_of_the_readme(top):
    entries = tree_of_readme()
    for path in sorted((ROOT / top).rglob("*.py")):
        relative = path.relative_to(ROOT).as_posix()
        if path.name == "__init__.py" or "__pycache__" in path.parts or relative.startswith("specdiff_dist/pb/"):
            continue
        assert relative in entries, f"{relative} is missing from the tree in README.md"


def test_the_tiers_of_the_readme_are_the_tiers():
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\| ([^|]+) \|", README, re.MULTILINE))
    expected = {
        name: f"{rule_name(config.rule)} {config.rule.leniency:g}" if config.rule.leniency else "lossless"
        for name, config in TIERS.items()
    }
    assert rows == expected


def test_the_readme_has_one_run_line_and_one_test_line():
    for marker, ending in (("run line", "serve run deployments:app"), ("test line", '"not slow and not gpu"')):
        block = re.search(rf"<!-- {marker} -->\n```bash\n(.*)\n```", README)
        assert block, f"README.md has no single line under <!-- {marker} -->"
        assert block[1].endswith(ending)
