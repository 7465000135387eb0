"""Options by the names of nanoGPT and transformers: each spelling of each gets its hint."""

import re

import pytest

from forge.cli import main
from forge.cli.elsewhere import OPTIONS


@pytest.mark.parametrize("command", OPTIONS)
def test_every_spelling_gets_the_hint_of_the_table(command, capsys):
    argument = () if command in ("train", "bench") else ("model",)
    for word, here in OPTIONS[command].items():
        option = re.fullmatch(r"--[a-z-]+", here)
        expected = f". Did you mean {here}?" if option else f"; {here}"
        for spelt in (word, word.replace("_", "-")):
            for given in ([f"--{spelt}=x"], [f"--{spelt}", "x"], [f"--{spelt}"]):
                assert main([command, *argument, *given]) == 2
                said = capsys.readouterr()
                assert said.out == ""
                assert said.err == f"forge: [command line] Unknown option: --{spelt}{expected}\n"


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_of_a_hint_is_one(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([command, "--help"]) == 0
    known = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    for word, here in OPTIONS[command].items():
        assert "--" + word.replace("_", "-") not in known
        assert set(re.findall(r"--[a-z0-9-]+", here)) <= known


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("train --dtype bfloat16", "--dtype. Did you mean --precision?"),
        ("train --dtype=bfloat16", "--dtype. Did you mean --precision?"),
        ("train --bias False", "--bias; every layer and norm has biases here, as in GPT-2"),
        ("train --eval_only", "--eval_only; forge eval RUN measures a trained model"),
        ("generate m --num_samples=3", "--num_samples. Did you mean --n?"),
        ("generate m --start hello", "--start. Did you mean --prompt?"),
        ("generate m --out_dir out", "--out_dir; the run or checkpoint folder is the argument"),
        ("train --n-layr 3", "--n-layr. Did you mean --n-layer?"),
        ("plot m --dtype x --out a.png", "--dtype."),
    ],
)
def test_hints(line, hint, capsys):
    assert main(line.split()) == 2
    assert f"Unknown option: {hint}" in capsys.readouterr().err
