"""The pages in docs/ quote the code as it is, run, and show what is really printed."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest

from forge import Device, Tape, tensor
from forge.config import Config
from forge.models import GPT2, GPT2Config
from forge.models.gpt2 import Rng

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
RUNNING = ["layernorm.md", "tour.md"]

# Where an excerpt leaves lines out.
GAP = re.compile(r"^ *# …$", re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page: what follows the opening fence, and the text."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def quotes(source: str, excerpt: str) -> bool:
    """Whether the pieces of an excerpt stand in the source in this order, whole lines of it."""
    start = 0
    for piece in GAP.split(excerpt):
        lines = piece.strip("\n")
        assert lines.strip()
        found = f"\n{source}".find(f"\n{lines}\n", start)
        if found < 0:
            return False
        start = found + len(lines) + 1
    return True


EXCERPTS = [
    pytest.param(head.split()[1], text, id=f"{page.name}-{number}-{head.split()[1]}")
    for page in PAGES
    for number, (head, text) in enumerate(blocks(page.name))
    if len(head.split()) == 2 and "." in head.split()[1]
]


@pytest.mark.parametrize(("file", "excerpt"), EXCERPTS)
def test_an_excerpt_is_in_its_file(file: str, excerpt: str) -> None:
    assert quotes((ROOT / file).read_text(encoding="utf-8"), excerpt), f"not in {file}:\n{excerpt}"


def test_excerpts_are_checked() -> None:
    assert len(EXCERPTS) >= 15
    source = "a\n  b\n  c\nd\n"
    for good in ("a\n", "  b\n  c\n", "a\n# …\n  c\n", "  b\n  # …\nd\n"):
        assert quotes(source, good)
    for bad in ("b\n", "a\nd\n", "  b\n# …\na\n", "  b \n"):
        assert not quotes(source, bad)


@pytest.mark.parametrize("page", RUNNING)
def test_the_code_runs_and_prints_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Some of it writes files.
    scope: dict[str, object] = {"__name__": "docs"}
    printed = ""
    ran = 0
    for head, text in blocks(page):
        if head == "python":
            stream = io.StringIO()
            with contextlib.redirect_stdout(stream):
                exec(compile(text, page, "exec"), scope)
            printed = stream.getvalue()
            ran += 1
        elif head == "text output":
            assert text == printed
    assert ran >= 2


def test_the_tour_lists_all_values_of_a_gpt_2_that_can_be_dropped() -> None:
    page = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    table = page.split("## What can be dropped")[1]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)
    config = GPT2Config(11, 8, 2, 2, 8, embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)
    model, key = GPT2(config), Rng(tensor(np.array([1, 2])))
    params = model.zeros(Device("cpu"))
    ids = tensor(np.zeros((3, 8), np.int64))

    def recorded(*names: str) -> Tape:
        tape = Tape(recompute=names)
        model.loss(params.leaves(tape), ids, ids, rng=key)
        return tape

    made = {node.op.name: list(node.op.made) for node in recorded().nodes}
    assert {op: re.findall(r"`(\w+)`", values) for op, values in rows} == made

    def saved(*names: str) -> int:
        return int(recorded(*names).summary().split()[-1].replace(",", ""))

    # The last add_layernorm's y is the head's, which keeps no inputs.
    C, blocks = 4 * ids.size * config.n_embd, config.n_layer
    freed = {"linear.out": 3 * blocks, "attention.out": blocks, "add_layernorm.y": 2 * blocks - 1}
    for name, width in (freed | {"mlp.pre": 4 * blocks, "mlp.hidden": 4 * blocks}).items():
        assert saved() - saved(name) == width * C, name
    assert saved() - saved("mlp.pre", "mlp.hidden") == 8 * blocks * C


def test_the_settings_that_a_run_may_leave_out_are_listed() -> None:
    text = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `config\.toml` \| (.*) \|$", text, re.MULTILINE)
    resolved = vars(Config().resolved(vocab_size=256))
    unset = {name for name, value in resolved.items() if value is None}
    assert set(re.findall(r"`(\w+)`", row)) == unset


def test_the_output_of_verify_is_what_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge.cli import main

    (shown,) = [text for head, text in blocks("layernorm.md") if head == "console"]
    command, output = shown.split("\n", 1)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command.removeprefix("$ forge ").split()) == 0
    # Errors and seconds are this machine's.
    numbers = re.compile(r"\d\.\de[+-]\d\d|\d+(?= s$)", re.MULTILINE)
    assert numbers.sub("#", capsys.readouterr().out) == numbers.sub("#", output)


@pytest.mark.parametrize("page", [page.name for page in PAGES])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / target).exists(), f"{page}: {target}"
