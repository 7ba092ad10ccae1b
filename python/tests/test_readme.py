"""A page whose first lines do not run: the fault guarded against."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def page_and_run() -> tuple[str, subprocess.CompletedProcess[str]]:
    """The page, and what its lines did."""
    if not README.exists():
        pytest.skip("not run: README.md is not here, only the wheel")
    pytest.importorskip("transformers", reason="not run: transformers is not installed")
    text = README.read_text()
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert program.count("HiddenStates(") == 1
    # On the simulated device, which the page shows the output of.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program],
                          capture_output=True, text=True, timeout=300, env=environment)
    return text, done


def test_the_lines_of_the_readme_run_and_print_what_it_says(page_and_run):
    text, done = page_and_run
    assert done.returncode == 0, done.stderr
    (said,) = re.findall(r"^offered .*$", done.stdout, re.MULTILINE)
    (promised,) = re.findall(r"^offered .*$", text, re.MULTILINE)
    shown, found = (re.sub(r"; stalls \d+; pinned .*", "", line) for line in (promised, said))
    # What was released when the report was made depends on copies that are under way.
    pattern = re.sub(r"\\\(released.*?\\\)", r"\\(.*\\)", re.escape(shown))
    assert re.fullmatch(pattern, found), f"{found!r} is not {shown!r}"


def test_what_the_readme_shows_and_varies_is_said_to_vary(page_and_run):
    """It showed one stall, of which most runs have none."""
    text, done = page_and_run
    after = text.partition("\noffered ")[2].partition("On a GPU")[0]
    assert "hangs on time, and so do\nthe stalls" in after
    assert re.search(r"; stalls \d+;", done.stdout), done.stdout


def test_the_lines_of_the_readme_set_no_cache_that_transformers_must_unset(page_and_run):
    assert "use_cache" not in page_and_run[1].stderr


def test_the_lines_of_the_benches_page_name_scripts_that_are_there():
    """They began with the name of a script, and could not be pasted."""
    page, root = README.parent / "benches" / "README.md", README.parents[1]
    if not page.exists():
        pytest.skip("not run: README.md is not here, only the wheel")
    blocks = re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if ".py" in line]
    assert len(lines) >= 9
    for line in lines:
        program, script = line.split()[:2]
        assert program == "python3" and (root / script).is_file(), line
