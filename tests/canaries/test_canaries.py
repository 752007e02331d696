"""Canaries end to end against a model that can be spoilt, and the rules of admission and comparison by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailspan
from loadgen.canaries import goldens, probes
from loadgen.canaries.check import Checked, check
from loadgen.canaries.client import Answer, Client, Refused, Token
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.prompts import REFERENCE, golden_prompts
from loadgen.canaries.record import record
from models.errors import UserError
from tests.canaries.fake_model import FakeModel
from tests.loadgen.stub import StubThread, unused_port

RUNS = 4  # the default of 20 is a matter of minutes, not of another path


class Served:
    """A FakeModel behind a socket; ``model`` may be changed between requests."""

    def __init__(self) -> None:
        self.model = FakeModel()
        self.stub = StubThread(lambda request: self.model.play(request))
        self.client = Client("", "fake", {})


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    with made.stub:
        made.client = Client(made.stub.url, "fake", {})
        yield made


@pytest.fixture(scope="module")
def recorded(served: Served) -> CanaryFile:
    served.model = FakeModel()
    return record(served.client, runs=RUNS)


def checked(served: Served, recorded: CanaryFile, **spoilt: Any) -> Checked:
    served.model = FakeModel(**spoilt)
    return check(served.client, recorded)


def said(found: Checked, kind: str) -> str:
    return "\n".join(one.said for one in found.findings if one.verdict == kind)


def test_a_recording_holds_all_four_kinds(recorded: CanaryFile, tmp_path: Path) -> None:
    assert len(recorded.goldens) == len(golden_prompts()) and recorded.left == ()
    assert all(
        len(one.tokens) == goldens.TOKENS and min(one.margins) >= goldens.MARGIN_FLOOR for one in recorded.goldens
    )
    assert recorded.noise == 0.0 and recorded.runs == RUNS
    assert recorded.reference is not None and len(recorded.reference) == len(REFERENCE.split()) - 1
    assert len(recorded.scores) == 120 and all(recorded.scores.values())
    recorded.write(tmp_path / "sub" / "c.json")
    assert CanaryFile.read(tmp_path / "sub" / "c.json") == recorded


def test_the_healthy_server_is_the_same_and_says_what_it_could_have_seen(served: Served, recorded: CanaryFile) -> None:
    for _ in range(3):
        found = checked(served, recorded)
        assert found.verdict == "same", found.findings
    text = said(found, "same")
    assert "a share of" in text and "lost with none won would have been" in text and "probes hold: greedy" in text


@pytest.mark.parametrize(
    ("spoilt", "verdict", "words"),
    [
        ({"wrong_share": 0.3}, "broken", "goldens: "),
        ({"extra_prompt_tokens": 1}, "broken", "tokenizer or template"),
        ({"wrong_on_hit": True}, "broken", "only when asked again: the prefix cache"),
        ({"wrong_under_load": 1.0}, "broken", "only under load: concurrency"),
        ({"lost_questions": 0.2}, "broken", "questions: "),
        ({"greedy_always": True}, "broken", "probe temperature: 1 different texts of 8"),
        ({"cap": 64}, "broken", "probe room: 64 tokens of 160"),
        ({"cap": 8}, "broken", "the answer ends after 8 tokens"),
        ({"other_tokenizer": True}, "broken", "another tokenizer"),
        ({"wrong_share": 1.0}, "broken", "drift: "),
        ({"noise": 0.25}, "numeric drift", "drift: KL"),
        ({"noise": 0.05}, "numeric drift", "answers moved"),
    ],
)
def test_each_fault_is_called_by_its_name(
    served: Served, recorded: CanaryFile, spoilt: dict[str, Any], verdict: str, words: str
) -> None:
    found = checked(served, recorded, **spoilt)
    assert found.verdict == verdict, found.findings
    assert words in said(found, verdict)
    assert json.loads(json.dumps(found.to_dict()))["verdict"] == verdict


def test_broken_goldens_say_their_kind(served: Served, recorded: CanaryFile) -> None:
    def kinds(recording: CanaryFile, **spoilt: Any) -> set[str]:
        found = {one.kind for one in checked(served, recording, **spoilt).findings if one.verdict == "broken"}
        return found - {"probe"}  # some find short answers odd

    assert kinds(recorded, wrong_on_hit=True) == {"cache"}
    assert kinds(recorded, wrong_under_load=1.0) == {"concurrency"}
    served.model = FakeModel(ends_at=6)
    ended = record(served.client, runs=RUNS)
    assert any(one.ended for one in ended.goldens)
    assert "no-end" in kinds(ended, never_ends=True)


def test_what_a_server_does_not_have_is_not_its_fault(served: Served, recorded: CanaryFile) -> None:
    found = checked(served, recorded, options=frozenset(), prompt_logprobs=False)
    assert found.verdict == "same"
    assert {one.name: one.passed for one in found.probes if one.passed is None} == {
        "seed": None,
        "n": None,
        "stop": None,
    }
    assert "prompt_logprobs refused (400)" in said(found, "same")
    served.model = FakeModel(prompt_logprobs=False)
    made = record(served.client, runs=2)
    assert made.reference is None and "400" in str(made.drift_refused)


def test_unstable_and_narrow_prompts_are_left_out_with_the_reason(served: Served) -> None:
    served.model = FakeModel(narrow=True)
    made = record(served.client, runs=2)
    assert made.left and all("margin" in one.reason and "wanted" in one.reason for one in made.left)
    served.model = FakeModel(wrong_under_load=0.5)  # which of them meet another request is the scheduler's choice
    made = record(served.client, runs=4)
    assert made.goldens and made.left and all("the baseline runs disagree" in one.reason for one in made.left)
    served.model = FakeModel(logprobs=False)
    with pytest.raises(UserError, match="gives no logprobs"):
        record(served.client, runs=2)


def test_one_golden_that_fails_in_every_round_is_one_piece_of_evidence(served: Served, recorded: CanaryFile) -> None:
    """A prompt on an edge is no broken server, however often it is asked."""
    first = recorded.goldens[0]
    odd = dataclasses.replace(
        recorded, goldens=(dataclasses.replace(first, tokens=("x", *first.tokens[1:])), *recorded.goldens[1:])
    )
    found = checked(served, odd)
    assert [sum(one.kind == goldens.BROKEN for one in found.compared[name]) for name in found.compared] == [1, 1, 1]
    assert found.verdict == "same" and f"1 of {3 * len(odd.goldens) - 2} canaries wrong, no alarm" in said(
        found, "same"
    )


# --- by hand ---


def token(text: str, ahead: float, logprob: float = -0.1, **others: float) -> Token:
    return Token(text, logprob, {text: logprob, "other": logprob - ahead, **others})


def answer(*tokens: Token, prompt_tokens: int | None = 7) -> Answer:
    return Answer("".join(t.text for t in tokens), tokens, "length", prompt_tokens, None, len(tokens), ())


GOLDEN = goldens.Golden("g", "p", ("a", "b", "c"), (3.0, 0.5, 3.0), (-0.1, -0.1, -0.1), 7)


@pytest.mark.parametrize(
    ("given", "kind", "step"),
    [
        (answer(token("a", 3), token("b", 0.5), token("c", 3)), goldens.SAME, None),
        (answer(token("a", 3), token("b", 0.5), token("c", 3), token("d", 3)), goldens.SAME, None),
        (answer(token("a", 3), token("b", 0.5, -0.3), token("c", 3)), goldens.NUMERIC, None),
        (answer(token("a", 3), token("x", 0.5, b=-0.4), token("c", 3)), goldens.NUMERIC, 1),  # 0.5 + 0.3 nats
        (answer(token("a", 3), token("x", 0.5, b=-4.0), token("c", 3)), goldens.BROKEN, 1),  # 0.5 + 3.9 nats
        (answer(token("x", 9.0), token("b", 0.5), token("c", 3)), goldens.BROKEN, 0),  # not among the likeliest
        (answer(token("a", 3)), goldens.BROKEN, 1),
        (answer(), goldens.BROKEN, 0),
        (answer(token("a", 3), token("b", 0.5), token("c", 3), prompt_tokens=8), goldens.BROKEN, None),
        (answer(token("a", 3), token("b", 0.5), token("c", 3), prompt_tokens=None), goldens.SAME, None),
    ],
)
def test_comparison_by_hand(given: Answer, kind: str, step: int | None) -> None:
    found = goldens.compare(GOLDEN, given, tolerated=0.01)
    assert (found.kind, found.step) == (kind, step)
    assert bool(found.note) == (kind != goldens.SAME)


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ("abc", "", True),
        ("", "", False),
        ("", "abc", False),
        ("abcdefgh", "abcdefgh", False),  # a broken model breaks alike everywhere
        ("abcdefghijkl", "ab", True),  # beside other load the first round is hurt too, but less
        ("abcde", "abc", False),
        ("abc", "de", False),  # chance
        ("abcdefghij", "klmnopqrst", False),
    ],
)
def test_what_breaks_mostly_in_one_round_is_of_that_round(here: str, there: str, expected: bool) -> None:
    assert goldens.mostly_beyond(set(here), set(there)) == expected


def test_an_answer_that_goes_on_where_it_ended_is_broken() -> None:
    whole = dataclasses.replace(GOLDEN, ended=True)
    tokens = (token("a", 3), token("b", 0.5), token("c", 3))
    stopped = dataclasses.replace(answer(*tokens), finish_reason="stop")
    assert goldens.compare(whole, stopped, 0.01).kind == goldens.SAME
    on = goldens.compare(whole, answer(*tokens, token("d", 3)), 0.01)
    assert (on.kind, on.step, on.diverged) == (goldens.BROKEN, 3, True) and "goes on where it ended" in on.note


def test_broken_is_a_third_of_the_answers_with_another_text() -> None:
    assert not goldens.called_broken(1, 21) and not goldens.called_broken(0, 0)
    assert goldens.called_broken(7, 21) and goldens.called_broken(1, 1)


def test_an_answer_is_kept_up_to_its_first_narrow_step() -> None:
    long = [token("a", 3.0) for _ in range(12)]
    narrow = [*long[:9], token("a", 0.01), *long[10:]]
    admitted, left = goldens.admit([("x", "p"), ("y", "q")], [[answer(*narrow), answer(*long[:5])]] * 3)
    assert [(one.id, len(one.tokens)) for one in admitted] == [("x", 9)]
    assert [(one.id, "5 tokens" in one.reason) for one in left] == [("y", True)]
    ended = [dataclasses.replace(answer(*long[:5]), finish_reason="stop")]
    (short,), _ = goldens.admit([("z", "r")], [ended] * 3)
    assert short.ended and len(short.tokens) == 5, "its end is worth some tokens"
    assert not goldens.admit([("z", "r")], [ended, [answer(*long[:5])], ended])[0], "one run was cut there"
    noisy = [[answer(*[token("a", 0.3, -0.1 + 0.02 * run) for _ in range(12)])] for run in range(3)]
    assert goldens.noise(noisy) == pytest.approx(0.04)
    assert goldens.admit([("x", "p")], noisy)[0] == []  # ten times the noise is more than the margin


# --- files and the command line ---


def test_the_command_records_and_checks(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served.model = FakeModel()
    file = tmp_path / "c.json"
    words = ["canaries", "record", "--target", served.stub.url, "-o", str(file), "--runs", "2", "--tokens", "16"]
    assert tailspan.main(words) == 0
    assert "goldens of 16 to 16 tokens" in capsys.readouterr().out
    words = ["canaries", "check", "--target", served.stub.url, "--canaries", str(file)]
    assert tailspan.main(words) == 0
    assert "verdict       same" in capsys.readouterr().out
    served.model = FakeModel(noise=0.25)
    assert tailspan.main(words) == 2
    served.model = FakeModel(wrong_share=0.5)
    assert tailspan.main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out.partition("verdict       numeric drift\n")[2])["verdict"] == "broken"
    assert tailspan.main([*words[:2], "--target", f"http://127.0.0.1:{unused_port()}", *words[4:]]) == 4
    assert tailspan.main(["canaries", "record", "--target", served.stub.url, "--questions", "huge"]) == 4
    assert tailspan.main(["canaries", "check", "--target", f"{served.stub.url},{served.stub.url}", *words[4:]]) == 4


def test_files_of_others_are_refused_with_a_remedy(recorded: CanaryFile, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    for content, why in (("{", "not JSON"), ("[]", "version None"), ('{"tailspan_canaries": 1}', "not a canary file")):
        file.write_text(content)
        with pytest.raises(UserError, match=why):
            CanaryFile.read(file)
    with pytest.raises(UserError, match="cannot be read"):
        CanaryFile.read(tmp_path / "none.json")
    dataclasses.replace(recorded, questions_sha256="0" * 64).write(file)
    with pytest.raises(UserError, match="are not those of this version"):
        CanaryFile.read(file)


def test_probes_need_a_server(served: Served) -> None:
    nobody = Client(f"http://127.0.0.1:{unused_port()}", "fake", {})
    with pytest.raises(UserError, match="no answer to a canary"):
        probes.run(nobody)
    served.model = FakeModel(options=frozenset())
    with pytest.raises(Refused):
        served.client.chat("x", 4, n=2)
