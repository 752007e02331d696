"""Prompts: exact in tokens under the reference tokenizer and template, salted, the same for any number of workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.bodies import Sampling
from loadgen.calls import Calls, sampling_ratio
from loadgen.prompts import CORPUS, PromptMaker
from loadgen.schedule import build
from loadgen.traces.trace import Rows
from loadgen.transforms import Transforms
from models.store import Reference, load_reference
from models.tiny import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_reference(str(write_tiny(tmp_path_factory.mktemp("tiny"))))


def maker(reference: Reference, salt: str = "run-1", seed: int = 0) -> PromptMaker:
    return PromptMaker(reference.tokenizer, reference.template, seed=seed, salt=salt)


def count(reference: Reference, text: str) -> int:
    return len(reference.tokenizer.encode(reference.template.render([{"role": "user", "content": text}])))


def exact(reference: Reference) -> None:
    prompts = maker(reference)
    lengths = [*range(prompts.minimum, prompts.minimum + 60), 100, 155, 317, 480, 1155, 2734, 6000]
    for index, tokens in enumerate(lengths):
        prompt = prompts.make(index, tokens)
        assert prompt.tokens == tokens == count(reference, prompt.text), (index, prompt.text)


def test_the_count_is_exact_for_a_small_vocabulary(tiny: Reference) -> None:
    exact(tiny)


def test_the_count_is_exact_for_smollm2(smollm2: Path) -> None:
    exact(load_reference(str(smollm2)))


def test_below_the_minimum_is_refused(tiny: Reference) -> None:
    prompts = maker(tiny)
    with pytest.raises(ValueError, match="minimum"):
        prompts.make(0, prompts.minimum - 1)


def test_no_two_prompts_share_a_prefix_of_a_block(tiny: Reference) -> None:
    """Neither within a run nor between runs with the same seed: only the template's own beginning is shared."""
    before = tiny.tokenizer.encode(tiny.template.render([{"role": "user", "content": "X"}]).split("X")[0])
    heads = set()
    for salt in ("run-1", "run-2"):
        prompts = maker(tiny, salt)
        words = prompts._salt_length * prompts._word_tokens
        for index in range(500):
            ids = tiny.tokenizer.encode(
                tiny.template.render([{"role": "user", "content": prompts.make(index, prompts.minimum + 40).text}])
            )
            assert ids[: len(before)] == before
            heads.add(tuple(ids[len(before) : len(before) + words]))
    assert len(heads) == 1000


def test_the_same_seed_salt_and_index_give_the_same_prompt_and_others_do_not(tiny: Reference) -> None:
    first, again = maker(tiny).make(5, 120), maker(tiny).make(5, 120)
    assert first == again
    assert first.text != maker(tiny).make(6, 120).text
    other_salt, other_seed = maker(tiny, salt="run-2").make(5, 120).text, maker(tiny, seed=1).make(5, 120).text
    assert first.text.partition(".")[2] == other_salt.partition(".")[2], "the salt changes the salt words alone"
    assert first.text.partition(".")[0] != other_salt.partition(".")[0]
    assert first.text.partition(".")[2] != other_seed.partition(".")[2]


def test_the_corpus_is_prose_without_repeats() -> None:
    lines = CORPUS.read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(lines) >= 100
    assert all(line.isascii() and line.endswith(".") and line == line.strip() for line in lines)


def calls_of(reference: Reference, worker: int, workers: int, *, exact_output: bool = True) -> Calls:
    rows = Rows(Path("made.csv"))
    for n in range(21):
        rows.keep(n * 250_000_000, 30 + 7 * n, 1 + n)
    prompts = maker(reference)
    trace = rows.trace("made", "azure-2023", "0", [])
    schedule = build(trace, Transforms(seed=0, min_input=prompts.minimum))
    return Calls(schedule, prompts, Sampling("m", 0, 0.7, 0.9, exact_output), "run-1", 0.5, worker, workers)


def test_one_worker_or_four_send_the_same_calls(tiny: Reference) -> None:
    alone = list(calls_of(tiny, 0, 1))
    parts = [call for worker in range(4) for call in calls_of(tiny, worker, 4)]
    assert sorted(parts, key=lambda call: call.index) == alone
    assert [call.index for call in alone] == list(range(21))
    assert [call.intended_s for call in alone] == [n * 0.25 for n in range(21)]


def test_a_call_carries_what_the_server_must_do(tiny: Reference) -> None:
    call = list(calls_of(tiny, 0, 1))[20]
    body = json.loads(call.body)
    assert (call.path, call.input_tokens, call.expected_output_tokens) == ("/v1/chat/completions", 170, 21)
    assert body["max_tokens"] == body["min_tokens"] == 21
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert count(tiny, body["messages"][0]["content"]) == 170
    assert len(call.trace_id) == 32
    assert len(call.span_id) == 16
    plain = json.loads(next(iter(calls_of(tiny, 0, 1, exact_output=False))).body)
    assert not {"min_tokens", "ignore_eos"} & set(plain)


def test_spans_are_sampled_by_rate(tiny: Reference) -> None:
    assert sampling_ratio(49.9) == 1.0
    assert sampling_ratio(100) == 0.5
    assert sampling_ratio(1e6) == 0.01
    assert 0 < sum(call.sampled for call in calls_of(tiny, 0, 1)) < 21
