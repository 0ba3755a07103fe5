"""What says how the package is kept: versions it works with, its public names, the pages for contributors and their tools, the way to a release."""

import os
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trl_repulse._trl import TESTED


ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def works_with():
    """Package -> what it needs, and versions that tests were run with, from the page on installation."""
    page = (ROOT / "docs/installation.md").read_text(encoding="utf-8").partition("## Works with")[2]
    rows = re.findall(r"^\| (\w+) \| ([<>=][^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    return {name.lower(): (SpecifierSet(needs), versions.split(", ")) for name, needs, versions in rows}


def test_the_table_of_versions():
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    required = {each.name: each.specifier for each in map(Requirement, [*extras, *PROJECT["dependencies"]])}
    table = works_with()
    assert table.pop("python")[0] == SpecifierSet(PROJECT["requires-python"])
    assert {"trl", "transformers", "torch"} <= set(table)
    for name, (needs, versions) in table.items():
        assert needs == required[name] and all(f"{version}.9" in needs for version in versions), name
    assert (table["trl"][1][0], table["trl"][1][-1]) == TESTED
    jobs = yaml.safe_load((ROOT / ".github/workflows/versions.yml").read_text())["jobs"]
    packages = {each["name"]: each["packages"] for each in jobs["tests"]["strategy"]["matrix"]["include"]}
    assert packages["oldest"].split() == [f"{name}=={table[name][1][0]}.0" for name in ("trl", "transformers")]
    assert set(packages) == {"oldest", "newest", "main"}


def test_public_names_and_parameters():
    """If this fails, run `python docs/api_names.py` and look at the change: users see it."""
    script = runpy.run_path(str(ROOT / "docs/api_names.py"))
    assert script["LISTING"].read_text(encoding="utf-8") == script["listing"]()
    assert "trl_repulse.configs.repulse_config.RePULSeConfig.num_generations = 4\n" in script["listing"]()


def test_pages_for_contributors_are_short():
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 80
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 50
    named = re.findall(
        r"\]\(([^):]+)\)|`((?:trl_repulse|tests|docs|examples)/[\w./]+)`", (ROOT / "AGENTS.md").read_text()
    )
    assert len(named) > 8 and not [name for pair in named for name in pair if name and not (ROOT / name).exists()]
    template = (ROOT / ".github/PULL_REQUEST_TEMPLATE.md").read_text()
    assert "## Evidence" in template and "docs/api_names.py" in template


@pytest.mark.parametrize("step", ["Links of the README work on the package index", "The tag is the version"])
def test_steps_of_the_release(tmp_path, step):
    steps = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())["jobs"]["build"]["steps"]
    (command,) = (each["run"] for each in steps if each.get("name") == step)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / f"trl_repulse-{PROJECT['version']}.tar.gz").touch()
    names = {"GITHUB_REPOSITORY": "owner/trl-repulse", "GITHUB_REF_NAME": f"v{PROJECT['version']}"}
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, env=os.environ | names, check=True)
    text = (tmp_path / "README.md").read_text()
    links = re.findall(r'(?:\]\(|src="|srcset=")([^)"]+)', text)
    if step.startswith("Links"):
        assert len(links) > 10 and all(link.startswith(("https://", "#")) for link in links)
        assert f"](https://github.com/owner/trl-repulse/blob/v{PROJECT['version']}/docs/guide.md)" in text
        assert all("raw.githubusercontent.com" in link for link in links if link.endswith((".png", ".svg")))
    else:
        names["GITHUB_REF_NAME"] = "v9.9"
        assert subprocess.run(["bash", "-euc", command], cwd=tmp_path, env=os.environ | names).returncode == 1
