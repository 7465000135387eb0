"""Settings: types, ranges, rules, TOML, and what a resumed run may change."""

import dataclasses
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.config import (
    ELSEWHERE,
    FIELDS,
    INSTEAD,
    Config,
    changed_mathematics,
    load_toml,
    nearest,
    read_toml,
    setting_like,
    settings,
    to_toml,
)
from forge.errors import ConfigError


def refused(**values):
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    message = str(caught.value)
    assert message.startswith("[config] expected ")
    assert "\n" not in message
    return message


def test_tf32_is_a_way_to_multiply_float32():
    assert "expected --precision fp32 with --tf32, got bf16" in refused(precision="bf16", tf32=True)
    assert changed_mathematics(Config(), Config(tf32=True)) == ["tf32"]


def test_an_eager_run_is_the_same_run():
    assert changed_mathematics(Config(), Config(eager=True)) == []


def test_every_setting_is_described():
    names = [setting.name for setting in settings()]
    assert names == [field.name for field in dataclasses.fields(Config)]
    for setting in settings():
        assert setting.help
        assert setting.section
        assert setting.flag == "--" + setting.name.replace("_", "-")
        if type(setting.default) in (int, float):
            assert setting.range, setting.name


def test_ranges_and_units_are_read_apart():
    by_name = {setting.name: setting for setting in settings()}
    assert (by_name["block_size"].range, by_name["block_size"].unit) == ("[1, 1048576]", "tokens")
    assert (by_name["beta1"].range, by_name["beta1"].unit) == ("[0, 1)", "")
    assert (by_name["data"].range, by_name["data"].unit) == ("", "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_layer", 0),
        ("n_layer", 10**9),
        ("n_head", -4),
        ("n_embd", 0),
        ("block_size", 0),
        ("vocab_size", 0),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("init_std", 0.0),
        ("val_fraction", 1.0),
        ("steps", -1),
        ("batch_size", 0),
        ("micro_batch", 0),
        ("lr", -1e-3),
        ("lr", math.nan),
        ("lr", math.inf),
        pytest.param("lr", 10**400, id="lr-huge"),
        ("beta2", 1.0),
        ("eps", 0.0),
        ("grad_clip", -1.0),
        ("grad_clip", math.inf),
        ("seed", -1),
        ("seed", 2**32),
        ("threads", 0),
        ("log_every", 0),
        ("keep", 0),
    ],
)
def test_out_of_range_names_flag_range_and_value(name, value):
    message = refused(**{name: value})
    assert f"expected --{name.replace('_', '-')} in " in message
    assert f", got {math.inf if value == 10**400 else value};" in message


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("n_layer", 4.0, "an integer"),
        ("n_layer", True, "an integer"),
        ("n_layer", None, "an integer"),
        ("lr", "fast", "a number"),
        ("data", 3, "a path"),
        ("out", "", "a path"),
        ("threads", "all", "an integer"),
    ],
)
def test_wrong_type(name, value, kind):
    assert f"expected --{name.replace('_', '-')} to be {kind}, got {value!r}" in refused(
        **{name: value}
    )


def test_names_of_other_programs_lead_to_settings():
    for word, name in ELSEWHERE.items():
        assert word not in FIELDS
        assert setting_like(word) == f"did you mean {name}?"
        assert setting_like(word.replace("_", "-")) == f"did you mean {name}?"


def test_settings_that_only_other_programs_have_are_explained():
    for word, clause in INSTEAD.items():
        assert word not in FIELDS | ELSEWHERE
        assert setting_like(word) == clause
        for flag in re.findall(r"--([a-z-]+)", clause):
            assert flag.replace("-", "_") in FIELDS or flag == "resume"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("MLP", "did you mean mlp?"),
        ("mpl", "did you mean mul or mlp?"),
        ("Cached-Attention", "did you mean cached_attention?"),
        ("atention", "did you mean attention?"),
        ("t", "did you mean T?"),
        ("xyz", "choose from: mlp, mul, attention, attention_backward, cached_attention, T"),
    ],
)
def test_a_misspelt_word_gets_the_nearest_whatever_its_case(word, hint):
    words = ("mlp", "mul", "attention", "attention_backward", "cached_attention", "T")
    assert nearest(word, words) == hint


def test_choices_hint_the_nearest():
    assert "--precision to be one of fp32, bf16, got 'fp16'; did you mean" in refused(
        precision="fp16"
    )
    assert "choose from: auto, cpu, cuda" in refused(device="tpu9000")


def test_rules_between_fields():
    message = refused(n_embd=130, n_head=4)
    assert "--n-embd divisible by --n-head, got 130 and 4; try --n-embd 128" in message
    message = refused(batch_size=12, micro_batch=8)
    assert "--batch-size divisible by --micro-batch, got 12 and 8; try --micro-batch 4" in message
    assert "--warmup-steps of at most --steps, got 100 and 20" in refused(
        warmup_steps=100, steps=20
    )
    assert "--warmup-steps of at most --schedule-steps" in refused(
        warmup_steps=100, schedule_steps=50
    )


def test_an_integer_is_a_number():
    config = Config(lr=1)
    assert type(config.lr) is float


def test_resolved_fills_what_follows_from_other_fields():
    config = Config(steps=2000, n_embd=128).resolved(256)
    assert config.vocab_size == 256
    assert config.init_std == pytest.approx(0.0559, abs=1e-4)
    assert (config.warmup_steps, config.schedule_steps) == (100, 2000)
    assert Config(steps=20).resolved(256).warmup_steps == 2
    assert Config(vocab_size=300, init_std=0.02).resolved(256) == dataclasses.replace(
        Config().resolved(256), vocab_size=300, init_std=0.02
    )
    assert config.resolved(256) == config


def test_a_longer_run_keeps_its_schedule():
    first = Config(steps=2000).resolved(256)
    longer = dataclasses.replace(first, steps=4000).resolved(256)
    assert longer.schedule_steps == 2000
    assert changed_mathematics(first, longer) == []


def test_vocabulary_smaller_than_the_tokenizers():
    with pytest.raises(ConfigError, match="--vocab-size of at least 256, the tokenizer's, got 100"):
        Config(vocab_size=100).resolved(256)


def test_what_changes_the_mathematics():
    names = {setting.name for setting in settings() if setting.effect == "mathematics"}
    assert {"n_layer", "dropout", "batch_size", "lr", "schedule_steps", "precision", "seed"} < names
    free = {"steps", "micro_batch", "threads", "log_every", "eval_every", "keep", "out", "device"}
    assert not free & names
    old = Config().resolved(256)
    new = dataclasses.replace(old, seed=1, n_head=8, threads=2, keep=9, data="moved.txt")
    assert changed_mathematics(old, new) == ["n_head", "seed"]


configs = st.builds(
    Config,
    n_layer=st.integers(1, 1024),
    n_head=st.just(1),
    n_embd=st.integers(1, 9999),
    lr=st.floats(0, 100),
    eps=st.floats(0, 1, exclude_min=True),
    init_std=st.none() | st.floats(1e-9, 10),
    data=st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    precision=st.sampled_from(["fp32", "bf16"]),
    threads=st.none() | st.integers(1, 4096),
)


@given(configs)
def test_toml_reads_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8", newline="")
    assert load_toml(path) == config


def test_flags_win_over_the_file_before_anything_is_judged(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("n_embd = 130\nlr = 1e-3\n")
    config = load_toml(path, {"n_head": 5, "lr": 2e-3})
    assert (config.n_embd, config.n_head, config.lr) == (130, 5, 2e-3)
    assert read_toml(path) == {"n_embd": 130, "lr": 1e-3}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("n_layr = 4", "'n_layr'; did you mean n_layer?"),
        ("learning_rate = 1e-3", "'learning_rate'; did you mean lr?"),
        ("n-layer = 4", "'n-layer'; did you mean n_layer?"),
        ("N_LAYER = 4", "'N_LAYER'; did you mean n_layer?"),
        ("bias = false", "'bias'; every layer and norm has biases here, as in GPT-2"),
        ("zzz = 4", "'zzz'; choose from: n_layer, n_head"),
        ("[model]\nn_layer = 4", "flat keys in"),
        ('n_layer = "four"', "to be an integer, got 'four'"),
        ("n_layer = ", "expected TOML in"),
        ("\xff\xfe", "expected TOML in"),
    ],
)
def test_bad_files_name_the_file_and_the_key(tmp_path, text, part):
    path = tmp_path / "c.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert part in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_toml(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="directory"):
        load_toml(tmp_path)
