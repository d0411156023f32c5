"""Environments of an installed wheel and one of its extras, without a download.

The packages are links to those of the environment that runs the tests, and no others: what an extra
does not ask for cannot be imported there.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def install_wheel(wheel: Path, folder: Path, extra: str) -> Path:
    """Make an environment with a wheel and the packages of an extra; return its programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    [site] = folder.glob("lib/python3*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    options = ("--no-deps", "--no-index", "--no-compile", "--quiet")
    subprocess.run([*pip, *options, str(wheel)], check=True)
    [project] = Distribution.discover(name="mcore-rl", path=[str(site)])
    for package in list_distributions(project.requires or (), extra).values():
        _link(package, site)
    return folder / "bin"


def list_distributions(requirements: Iterable[str], extra: str = "") -> dict[str, Distribution]:
    """Return the distributions of requirements and all that these require, by name.

    Raises:
        PackageNotFoundError: One of `requirements` is not installed.
    """
    direct = [
        requirement
        for requirement in map(Requirement, requirements)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    ]
    pending = [(requirement, True) for requirement in direct]
    distributions, seen = {}, set()
    while pending:
        requirement, is_direct = pending.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        try:
            package = distribution(requirement.name)
        except PackageNotFoundError:
            if is_direct:
                raise
            continue  # what set-up leaves out or replaces (launch/requirements)
        distributions[canonicalize_name(requirement.name)] = package
        for line in package.requires or ():
            inner = Requirement(line)
            extras = ("", *requirement.extras)
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
                pending.append((inner, False))
    return distributions


def list_top_levels(package: Distribution) -> set[str]:
    """Return the files and folders that a distribution has directly in site-packages."""
    names = {file.parts[0] for file in package.files or ()}
    return names - {"..", "__pycache__"}


def _link(package: Distribution, site: Path) -> None:
    for name in list_top_levels(package):
        target = site / name
        if not target.is_symlink():  # a namespace of several distributions
            target.symlink_to(Path(str(package.locate_file(name))))
