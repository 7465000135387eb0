"""The Python code of the README and of CONTRIBUTING runs, and the README keeps its promises."""

import re
from pathlib import Path

import pytest

from forge.cli import main

ROOT = Path(__file__).parents[1]


def code(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = code(page)
    assert blocks
    monkeypatch.chdir(tmp_path)
    # As a reader would, in one session.
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": "docs"})


def test_a_trained_model_is_used_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--n-layer=1", "--n-head=1", "--n-embd=8", "--block-size=8", "--batch-size=1"]
    assert main(["train", "--steps=1", "--device=cpu", *sizes]) == 0
    capsys.readouterr()
    (block,) = code("docs/runs.md")
    exec(compile(block, "runs.md", "exec"), {"__name__": "docs"})
    assert len(capsys.readouterr().out) > 50


def test_the_tour_is_short() -> None:
    lines = [line for block in code("README.md") for line in block.splitlines() if line.strip()]
    assert len(lines) <= 25


def test_links_lead_somewhere() -> None:
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page.name}: {target}"
