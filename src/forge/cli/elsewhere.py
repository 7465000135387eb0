"""Options that other programs have: what there is here in their place."""

import re

from forge.config import ELSEWHERE, INSTEAD

_MODEL = "the run or checkpoint folder is the argument here, without an option"
_COMPILED = "kernels are always compiled, and kept in the cache"
_USING = {
    "checkpoint": _MODEL,
    "ckpt_path": _MODEL,
    "compile": _COMPILED,
    "dtype": "--weights",
    "init_from": _MODEL,
    "model_name_or_path": _MODEL,
    "out_dir": _MODEL,
}
# By command: what nanoGPT and transformers call an option -> the option, or what happens instead.
OPTIONS = {
    "train": {
        **{word: "--" + name.replace("_", "-") for word, name in ELSEWHERE.items()},
        **INSTEAD,
    },
    "generate": {
        **_USING,
        "do_sample": "--temperature 0 always takes the most probable token",
        "max_length": "--max-new-tokens",
        "max_tokens": "--max-new-tokens",
        "num_return_sequences": "--n",
        "num_samples": "--n",
        "start": "--prompt",
        "stop_strings": "--stop",
    },
    "eval": {**_USING, "dataset": "--data"},
    "bench": {"compile": _COMPILED, "dtype": "--precision"},
}


def hint(command: str, option: str) -> str:
    """What ends a line about another program's option; empty where it is unknown."""
    word = option.removeprefix("--").replace("-", "_")
    here = OPTIONS.get(command, {}).get(word, "")
    if not here:
        return ""
    return f". Did you mean {here}?" if re.fullmatch("--[a-z-]+", here) else f"; {here}"
