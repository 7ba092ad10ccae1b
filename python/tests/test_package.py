"""A package that does not say what it is: the faults guarded against are a missing version, a wheel
without its licences, and a type checker that is told nothing.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import lightering
import pytest
from lightering import _native

ROOT = Path(__file__).parents[2]


def test_the_version_is_that_of_the_wheel_and_of_the_sources():
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightering.__version__)
    assert lightering.__version__ == importlib.metadata.version("lightering")
    manifest = ROOT / "python" / "Cargo.toml"
    if not manifest.exists():
        pytest.skip("not run in full: the sources are not here, only the wheel")
    for crate in (manifest, ROOT / "Cargo.toml"):
        assert f'\nversion = "{lightering.__version__}"\n' in crate.read_text(), crate


def test_a_wheel_carries_both_licences_and_names_them():
    wheel = importlib.metadata.distribution("lightering")
    assert wheel.metadata["License-Expression"] == "MIT OR Apache-2.0"
    assert set(wheel.metadata.get_all("License-File") or []) == {"LICENSE-APACHE", "LICENSE-MIT"}
    carried = {file.name: file.read_text() for file in wheel.files or [] if "LICENSE" in file.name}
    assert "MIT License" in carried["LICENSE-MIT"] and "Apache" in carried["LICENSE-APACHE"]
    for name, text in carried.items():
        if (ROOT / name).exists():
            assert (ROOT / name).read_text() == text, name


def test_a_wheel_carries_types_and_stubs_that_name_what_there_is():
    package = Path(lightering.__file__).parent
    assert (package / "py.typed").exists()
    stubs = (package / "_native.pyi").read_text()
    for name in dir(_native):
        if not name.startswith("__") or name == "__version__":
            found = re.search(rf"^(class|def) {name}\b|^{name}: ", stubs, re.MULTILINE)
            assert found, f"_native.{name} is not in the stubs"
    kinds = [kind for kind in vars(_native).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, BaseException):
            continue
        body = re.split(rf"^class {kind.__name__}:", stubs, flags=re.MULTILINE)[1]
        body = re.split(r"^class ", body, flags=re.MULTILINE)[0]
        named = set(re.findall(r"^    (?:def )?(\w+)[:(]", body, re.MULTILINE))
        told = {name for name in named if not name.startswith("__")}
        assert named - told <= set(dir(kind)), kind
        assert told == {name for name in vars(kind) if not name.startswith("__")}, kind
    assert len(kinds) > 15
