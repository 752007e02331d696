"""Every sampling rule against a slow reference, and each row independent of its batch-mates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.phase_clock import PhaseClock
from engine.request import Request, SamplingParams, derived_seed
from engine.sampling import Shaper, nucleus, sample, uniform

VOCAB = 97
EOS = frozenset({2})


def request(prompt: list[int], output: list[int], **params: object) -> Request:
    settings: dict[str, object] = {"max_tokens": 50, "seed": 3}
    made = Request("r", prompt, SamplingParams(**{**settings, **params}), PhaseClock(0), lambda output: None)  # type: ignore[arg-type]
    made.tokens = [*prompt, *output]
    made.seed = made.params.seed or 0
    made.shaper = Shaper.of(made.params)
    return made


def reference(row: list[float], asked: Request) -> dict[int, float]:
    """Candidates and their logits / T, by the definitions, one token at a time, in float64."""
    params, prompt, output = asked.params, asked.prompt_ids, asked.output_ids
    logits = {token: float(value) for token, value in enumerate(row)}
    for token, bias in params.logit_bias:
        logits[token] += bias
    if len(output) < params.min_tokens:
        for token in EOS.union(params.stop_token_ids):
            logits[token] = -math.inf
    for token in logits:
        if token in prompt or token in output:
            by = params.repetition_penalty
            logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        count = output.count(token)
        logits[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
    if params.temperature < 1e-5:
        return {max(logits, key=lambda token: logits[token]): 0.0}
    scaled = {token: value / params.temperature for token, value in logits.items() if value > -math.inf}

    def shares(of: dict[int, float]) -> dict[int, float]:
        peak = max(of.values())
        total = sum(math.exp(value - peak) for value in of.values())
        return {token: math.exp(value - peak) / total for token, value in of.items()}

    share = shares(scaled)
    best = max(share.values())
    scaled = {token: value for token, value in scaled.items() if share[token] >= params.min_p * best * (1 - 1e-6)}
    if params.top_k > 0:
        kept = sorted(scaled, key=lambda token: -scaled[token])[: params.top_k]
        scaled = {token: scaled[token] for token in kept}
    if params.top_p < 1:
        share, seen, kept = shares(scaled), 0.0, []
        for token in sorted(scaled, key=lambda token: -scaled[token]):
            kept.append(token)
            seen += share[token]
            if seen >= params.top_p - 1e-6:
                break
        scaled = {token: scaled[token] for token in kept}
    return scaled


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 3, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    frequency=st.sampled_from([0.0, 0.4, -1.5]),
    presence=st.sampled_from([0.0, 1.0, -2.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.7]),
    bias=st.sampled_from([(), ((5, 3.0), (96, -100.0)), ((2, 100.0),)]),
    min_tokens=st.sampled_from([0, 9]),
)
def test_a_draw_is_the_references(
    seed: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    frequency: float,
    presence: float,
    repetition: float,
    bias: tuple[tuple[int, float], ...],
    min_tokens: int,
) -> None:
    rng = np.random.default_rng(seed % 1000)
    row = rng.normal(0, 3, VOCAB).astype(np.float32)
    asked = request(
        rng.integers(0, VOCAB, 6).tolist(),
        rng.integers(0, 9, 7).tolist(),
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        logit_bias=bias,
        min_tokens=min_tokens,
        stop_token_ids=(4,),
    )
    left = reference(row.tolist(), asked)
    with np.errstate(over="ignore"):
        noise = -np.log(-np.log(uniform(seed, len(asked.tokens), np.arange(VOCAB))))
    if temperature == 0:
        noise = np.zeros(VOCAB)
    best = sorted(left, key=lambda token: -(left[token] + noise[token]))
    tokens, finite = sample(torch.from_numpy(row)[None], [asked], EOS)
    assert finite == [True]
    ahead = left[best[0]] + noise[best[0]] - left[best[1]] - noise[best[1]] if len(best) > 1 else 1.0
    if ahead > 1e-4:  # nearer ones may differ by the rounding of float32
        assert tokens == [best[0]]


@pytest.mark.parametrize("spread", [0.0, 1e-9, 0.3, 2.0, 8.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.95, 1 - 1e-9])
def test_a_nucleus_of_any_width_is_that_of_a_full_sort(spread: float, top_p: float) -> None:
    weights = np.exp(spread * np.random.default_rng(1).normal(0, 1, 49_152))
    weights[5] = weights[77] = 0.0
    weights /= weights.max()
    kept = nucleus(weights, top_p)
    share = np.cumsum(np.sort(weights)[::-1]) / weights.sum()
    assert len(set(kept.tolist())) == len(kept)
    assert abs(len(kept) - (int(np.searchsorted(share, top_p)) + 1)) <= (1 if spread else 2)  # sums in another order
    assert weights[kept].min() >= np.delete(weights, kept).max(initial=0.0)


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    share = torch.softmax(row[0] / 0.8, 0).tolist()
    counts = [0] * 4
    for seed in range(4000):
        counts[sample(row, [request([0], [], seed=seed, temperature=0.8)], EOS)[0][0]] += 1
    assert all(
        abs(count / 4000 - p) < 4 * math.sqrt(p * (1 - p) / 4000) for count, p in zip(counts, share, strict=True)
    )


def test_a_row_with_anything_asked_beside_any_mates_is_the_row_alone() -> None:
    rng = np.random.default_rng(7)
    rows = torch.from_numpy(rng.normal(0, 3, (24, VOCAB)).astype(np.float32))
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.9, "top_k": 5, "logprobs": 3},
        {"temperature": 0.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 0},
        {"temperature": 1.0, "logit_bias": ((7, 4.0),), "seed": None},
    ]

    def mates() -> list[Request]:
        return [request([1, 2, 3], [5, 5, 8], **kinds[n % len(kinds)]) for n in range(24)]

    batch = mates()
    tokens, _ = sample(rows, batch, EOS)
    for n, alone in enumerate(mates()):
        assert sample(rows[n : n + 1], [alone], EOS)[0] == [tokens[n]]
        assert alone.newest == batch[n].newest


def test_tiny_temperatures_are_greedy_and_never_nan() -> None:
    row = torch.tensor([[1.0, 5.0, 4.99, -3.0]])
    for temperature in (0.0, 1e-300, 1e-9, 1e-5, 2e-5):
        assert sample(row, [request([0], [], temperature=temperature)], EOS)[0] == [1]


def test_logprobs_are_the_models_own() -> None:
    row = torch.tensor([[0.0, 1.0, 2.0, -1.0, 2.0]])
    asked = request([0], [2, 2], temperature=0, logprobs=3, frequency_penalty=2.0, logit_bias=((3, 50.0),))
    tokens, _ = sample(row, [asked], EOS)
    want = torch.log_softmax(row[0].double(), 0).tolist()
    assert tokens == [3] and asked.newest is not None
    assert asked.newest.token == 3 and asked.newest.rank == 5
    assert asked.newest.logprob == pytest.approx(want[3])
    assert {token for token, _ in asked.newest.top} == {2, 4, 1}
    assert [value for _, value in asked.newest.top] == pytest.approx([want[2], want[4], want[1]])


def test_rows_that_are_not_finite_fail_alone() -> None:
    rows = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [3.0, 1.0]])
    asked = [request([0], [], temperature=0, frequency_penalty=1.0, logprobs=1) for _ in range(3)]
    tokens, finite = sample(rows, asked, EOS)
    assert finite == [True, False, True] and (tokens[0], tokens[2]) == (1, 0)


def test_seeds_of_choices() -> None:
    assert derived_seed(None, 3) is None
    assert derived_seed(-5, 0) == -5
    seeds = {derived_seed(seed, choice) for seed in (-5, 0, 1, 42) for choice in range(128)}
    assert len(seeds) == 4 * 128
