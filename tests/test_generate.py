"""Generation: sampling against its exact distribution, and the cache against no cache.

The oracles are plain Python loops over sorted lists, and full forward passes.
"""

import itertools
import math

import numpy as np
import pytest

from forge.errors import ArgumentError
from forge.generate import Sampling, distribution, draw, generate
from forge.models.gpt2 import GPT2, GPT2Config
from forge.params import Params
from forge.philox import uniform
from forge.tensor import Device, tensor

V, N = 11, 8
MODEL = GPT2(GPT2Config(vocab_size=V, block_size=N, n_layer=2, n_head=2, n_embd=8, init_std=0.5))


def weights(device):
    params = Params(MODEL.shapes(), Device(device))
    params.load_(MODEL.init(3))
    return params


@pytest.fixture(scope="module", params=["reference", "cpu"])
def params(request):
    return weights(request.param)


def array(*ids):
    return np.array(ids, np.int64)


PROMPTS = [
    array(1, 2, 3),
    array(4),
    array(9, 8, 7, 6, 5),
    array(2, 2),
    array(0, 1, 2, 3, 4, 5, 6, 7),
]
GREEDY = Sampling(temperature=0)


def texts(model_params, prompts, count, sampling, **keywords):
    grown = [[] for _ in prompts]
    for token in generate(MODEL, model_params, prompts, count, sampling, **keywords):
        grown[token.index].append(token.id)
    return grown


def last_logits(params, ids):
    return MODEL.logits(params, tensor(np.array([ids]), device=params.flat.device)).numpy()[0, -1]


def without_cache(params, prompt, count):
    """Greedy, by a whole forward pass per token; the same rule for a full context."""
    text, start, grown = [int(i) for i in prompt], 0, []
    for _ in range(count):
        grown.append(int(np.argmax(last_logits(params, text[start:]))))
        text.append(grown[-1])
        if len(text) - start > N:
            start = len(text) - N // 2
    return grown


# ---- Sampling


def plain_distribution(logits, history, s):
    """The documented filters, one after the other, over a sorted list of (probability, token)."""
    logits = [float(x) for x in logits]
    for token in set(history):
        x = logits[token]
        logits[token] = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if s.temperature == 0:
        return [1.0 if token == order[0] else 0.0 for token in range(len(logits))]
    weight = {token: math.exp((logits[token] - max(logits)) / s.temperature) for token in order}
    kept = order[: s.top_k] if s.top_k else order
    total = sum(weight[token] for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if mass < s.top_p:
            nucleus.append(token)
        mass += weight[token] / total
    first = weight[nucleus[0]]
    kept = [token for token in nucleus if weight[token] >= s.min_p * first]
    total = sum(weight[token] for token in kept)
    return [weight[token] / total if token in kept else 0.0 for token in range(len(logits))]


SETTINGS = [
    Sampling(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
    for t, k, p, m, r in itertools.product(
        (0.7, 1.0, 1.8), (0, 4), (1.0, 0.8), (0.0, 0.2), (1.0, 1.4)
    )
]
LOGITS = np.array([1.5, -0.3, 0.2, 2.0, 0.1, -1.0, 0.9, 1.1, -2.0, 0.4, 0.0], np.float32)
HISTORY = array(3, 8, 3, 0)


def label(s):
    return f"t{s.temperature} k{s.top_k} p{s.top_p} m{s.min_p} r{s.repetition_penalty}"


@pytest.mark.parametrize("sampling", [*SETTINGS, GREEDY], ids=label)
def test_distribution_is_the_documented_one(sampling):
    ours = distribution(LOGITS, HISTORY, sampling)
    assert ours == pytest.approx(plain_distribution(LOGITS, HISTORY, sampling), abs=1e-12)


@pytest.mark.parametrize("sampling", SETTINGS, ids=label)
def test_draws_follow_the_distribution(sampling):
    """Chi-square over 4,000 draws, at a seed; the bound is passed by one seed in 100,000."""
    exact = np.array(plain_distribution(LOGITS, HISTORY, sampling))
    ours = distribution(LOGITS, HISTORY, sampling)
    n = 4000
    counts = np.bincount([draw(ours, u) for u in uniform(n, (7, 0))], minlength=V)
    possible = exact > 0
    assert not counts[~possible].any()
    chi_square = ((counts - n * exact)[possible] ** 2 / (n * exact[possible])).sum()
    freedom = possible.sum() - 1
    # Wilson and Hilferty's cube: normal to a percent also for one degree of freedom.
    if freedom:
        z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(
            2 / (9 * freedom)
        )
        assert z < 4.3


def test_top_p_keeps_the_token_that_crosses_it():
    logits = np.log(np.array([0.5, 0.3, 0.2]))
    kept = distribution(logits, array(), Sampling(top_p=0.6))
    assert kept == pytest.approx([0.5 / 0.8, 0.3 / 0.8, 0])


def test_of_equal_logits_the_lower_id_is_kept():
    logits = np.zeros(4)
    assert list(distribution(logits, array(), Sampling(top_k=2))) == [0.5, 0.5, 0, 0]
    assert list(distribution(logits, array(), GREEDY)) == [1, 0, 0, 0]


@pytest.mark.parametrize("u", [0.0, 0.25, 0.5, 1 - 2**-32, np.nextafter(1, 0)])
def test_draw_never_gives_the_impossible(u):
    assert draw(np.array([0, 0.25, 0, 0.75, 0]), u) in (1, 3)
    assert draw(np.array([0, 1.0, 0]), u) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_settings_out_of_range_are_refused_by_flag(name, value):
    with pytest.raises(ArgumentError, match=f"expected --{name.replace('_', '-')} "):
        Sampling(**{name: value})


# ---- The cache, batches, and the end of the context


def test_greedy_with_the_cache_is_greedy_without(params):
    for prompt in PROMPTS:
        assert texts(params, [prompt], 3, GREEDY) == [without_cache(params, prompt, 3)]


def test_prompts_of_any_lengths_grow_as_they_would_alone(params):
    for sampling in (GREEDY, Sampling(temperature=1.3, top_p=0.9, repetition_penalty=1.1, seed=5)):
        together = texts(params, PROMPTS, 25, sampling)
        assert together == [texts(params, [prompt], 25, sampling)[0] for prompt in PROMPTS]


def test_on_the_cpu_neighbours_change_no_bit():
    """NumPy, which the reference leaves sums to, adds in an order that depends on the shape."""
    params = weights("cpu")
    together = list(generate(MODEL, params, PROMPTS, 12, GREEDY))
    for index, prompt in enumerate(PROMPTS):
        alone = [token.logprob for token in generate(MODEL, params, [prompt], 12, GREEDY)]
        assert [token.logprob for token in together if token.index == index] == alone


def test_a_full_context_drops_its_older_half(params):
    slid = []
    grown = texts(params, PROMPTS, 20, GREEDY, slid=slid.append)
    assert grown == [without_cache(params, prompt, 20) for prompt in PROMPTS]
    # From a prompt of 1: full before tokens 9, 13, 17 of the text, of which it makes 21.
    assert slid.count(1) == 3


def test_an_ended_prompt_leaves_the_others_alone(params):
    def done(token):
        return token.index in (0, 3)

    grown = texts(params, PROMPTS, 12, GREEDY, done=done)
    assert [len(text) for text in grown] == [1, 12, 12, 1, 12]
    assert grown[2] == texts(params, [PROMPTS[2]], 12, GREEDY)[0]


def test_a_seed_and_stream_name_a_sample(params):
    hot = Sampling(temperature=2.0, seed=1)
    one, other, again = texts(params, [PROMPTS[0]] * 3, 20, hot, streams=[0, 1, 0])
    assert one == again != other
    assert texts(params, [PROMPTS[0]], 20, Sampling(temperature=2.0, seed=2))[0] != one


def test_samples_of_a_model_follow_its_distribution(params):
    """The whole way: model, filters, random numbers, over 2,000 streams of one prompt."""
    sampling = Sampling(temperature=0.9, top_k=6, top_p=0.95, min_p=0.05)
    n = 2000
    first = [text[0] for text in texts(params, [PROMPTS[0]] * n, 1, sampling, streams=range(n))]
    exact = np.array(plain_distribution(last_logits(params, PROMPTS[0]), PROMPTS[0], sampling))
    counts = np.bincount(first, minlength=V)
    possible = exact > 0
    assert not counts[~possible].any()
    chi_square = ((counts - n * exact)[possible] ** 2 / (n * exact[possible])).sum()
    assert chi_square < possible.sum() - 1 + 5 * math.sqrt(2 * (possible.sum() - 1))


def test_log_probabilities_are_the_models_own(params):
    sampling = Sampling(temperature=0.5, top_k=3, seed=9)
    text = list(PROMPTS[0])
    for token in generate(MODEL, params, [PROMPTS[0]], 4, sampling):
        logits = last_logits(params, text).astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        assert token.logprob == pytest.approx(exact[token.id], abs=1e-5)
        text.append(token.id)


def test_nothing_to_make(params):
    assert list(generate(MODEL, params, PROMPTS, 0, GREEDY)) == []
    assert list(generate(MODEL, params, [], 5, GREEDY)) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (array(), "a prompt of 1 to 8 tokens.* got 0"),
        (array(*range(9)), "a prompt of 1 to 8 tokens.* got 9"),
        (array(1, 11), "ids from 0 to 10.* got 1 to 11"),
        (array(-1), "ids from 0 to 10.* got -1 to -1"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(params, prompt, message):
    with pytest.raises(ArgumentError, match=message):
        list(generate(MODEL, params, [prompt], 1, GREEDY))
