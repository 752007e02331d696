"""Canaries among the load: when and how they are asked, and what the watch makes of them (runs: tests/loadgen)."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from loadgen.canaries.file import CanaryFile
from loadgen.canaries.goldens import Golden
from loadgen.canaries.mixed import HIGHEST_SHARE, MOST, PLACES, Mixed
from loadgen.canaries.watch import COLUMNS, CanaryWatch
from loadgen.plan_file import parse
from loadgen.schedule import Schedule
from models.errors import UserError
from telemetry import names

TOKENS = tuple(f" t{n}" for n in range(8))
MARGIN = 3.0


def golden(name: str, *, ended: bool = False) -> Golden:
    return Golden(name, f"Prompt {name}", TOKENS, (MARGIN,) * 8, (-0.1,) * 8, 7, ended)


def file_of(*goldens: Golden) -> CanaryFile:
    return CanaryFile(
        "fake", "http://x", 0, 2, 0.0, goldens, (), None, (), "not asked for", "small", "0" * 64, {}
    )  # fmt: skip


def entry(token: str, behind: float | None = None, instead_of: str = "") -> dict[str, Any]:
    """An entry of logprobs; behind: how far the token ``instead_of`` is below, nats."""
    top = [{"token": token, "logprob": -0.1}]
    if behind is not None:
        top.append({"token": instead_of, "logprob": -0.1 - behind})
    return {"token": token, "logprob": -0.1, "top_logprobs": top}


def row(name: str, place: str = "miss", tokens: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    told = [entry(token) for token in TOKENS] if tokens is None else tokens
    found = {
        "index": 0, "canary_kind": "golden", "canary_id": name, "canary_place": place, "target": "http://a",
        "error": None, "finish_reason": "length", "prompt_tokens_reported": 7, "cached_tokens": None,
        "completion_tokens_reported": len(told), "output_chars": 3 * len(told), "logprobs": json.dumps(told),
        "output_sha": "x",
    }  # fmt: skip
    assert set(found) == set(COLUMNS)
    return found | more


def changed(behind: float, step: int = 2) -> list[dict[str, Any]]:
    """An answer that leaves the golden at a step, where its token is so far behind now."""
    return [*map(entry, TOKENS[:step]), entry(" z", behind, TOKENS[step]), *map(entry, TOKENS[step + 1 :])]


def watched(*rows: dict[str, Any], ended: bool = False) -> CanaryWatch:
    watch = CanaryWatch(file_of(*(golden(f"g{n}", ended=ended) for n in range(40))))
    watch.take(rows)
    return watch


def verdict(watch: CanaryWatch) -> tuple[str, str, str]:
    found = watch.findings()[0]
    return found.verdict, found.kind, found.said


# --- the plan ---
def schedule(n: int) -> Schedule:
    ints = np.full(n, 50, dtype=np.int32)
    return Schedule(
        np.arange(n) * 0.1, np.arange(n), ints, ints, n * 0.1, (), np.arange(n), ints * 0, ints.astype(np.int8) * 0
    )


@pytest.mark.parametrize(
    ("requests", "share", "count"), [(300, 0.02, 8), (10, 0.02, 4), (1000, 0.1, 112), (10**6, 0.02, MOST)]
)
def test_canaries_come_in_whole_groups_at_the_moments_of_requests(requests: int, share: float, count: int) -> None:
    mixed = Mixed.of_file(file_of(golden("a"), golden("b")), "c.json", share, salted=True)
    assert mixed.count(requests) == count and count % len(PLACES) == 0
    if requests > 1000:
        return
    plain_one, made = schedule(requests), mixed.into(schedule(requests), 1)
    assert made.canary is not None and len(made) == requests + count
    load = made.canary < 0
    assert np.array_equal(made.intended_s[load], plain_one.intended_s) and np.array_equal(
        made.trace_row[load], plain_one.trace_row
    )
    assert np.array_equal(made.canary[~load], np.arange(count))
    assert np.all(np.diff(made.intended_s) >= 0)
    assert set(made.intended_s[~load]) <= set(plain_one.intended_s)
    if count >= 16:  # spread over the whole of the load
        quarters = np.histogram(made.intended_s[~load], bins=4, range=(0, plain_one.intended_s[-1]))[0]
        assert quarters.max() - quarters.min() <= 2


def test_a_group_asks_one_golden_of_one_replica_as_miss_hit_and_plain_with_one_salt() -> None:
    mixed = Mixed.of_file(file_of(golden("a"), golden("b")), "c.json", 0.1, salted=True)
    assert Mixed.of(json.loads(json.dumps(mixed.to_dict()))) == mixed
    asked = [(mixed.asked(n, 2)[0], mixed.asked(n, 2)[1].id, mixed.replica(n, 2)) for n in range(16)]
    assert asked[:4] == [("miss", "a", 0), ("hit", "a", 0), ("plain", "a", 0), ("hot", "hot", 0)]
    assert [one[1:] for one in asked[::4]] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    bodies = [json.loads(mixed.body(n, 2, "m", "run")) for n in range(5)]
    salts = [body["cache_salt"] for body in bodies]
    assert len(set(salts[:4])) == 1 and salts[4] != salts[0]
    assert [body.get("stream", False) for body in bodies] == [True, True, False, True, True]
    assert [body["temperature"] for body in bodies] == [0.0, 0.0, 0.0, 1.2, 0.0]
    assert all(("logprobs" in body) == (body["temperature"] == 0) for body in bodies)
    bare = Mixed.of_file(file_of(golden("a")), "c.json", 0.1, salted=False)
    assert "cache_salt" not in json.loads(bare.body(0, 1, "m", "run"))
    for share in (0.0, -1.0, HIGHEST_SHARE + 0.01, math.nan):
        with pytest.raises(UserError, match="no share for canaries"):
            Mixed.of_file(file_of(golden("a")), "c.json", share, salted=True)
    assert parse("canaries: c.json\ncanary_share: 0.05\n", "p.yaml") == {"canaries": "c.json", "canary_share": 0.05}


# --- the watch ---
def test_healthy_canaries_are_the_same_and_say_what_they_could_have_seen() -> None:
    found, kind, said = verdict(watched(*(row(f"g{n}") for n in range(40))))
    assert (found, kind) == ("same", "golden")
    assert "a share of 15 % wrong would have shown three or more with 95 %" in said
    assert "so few could have seen nothing" in verdict(watched(row("g0"), row("g1")))[2]


def test_what_did_not_come_or_cannot_be_read_is_no_evidence_of_wrong() -> None:
    lost = [row(f"g{n}", error=names.TIMEOUT_TOTAL, logprobs=None) for n in range(20)]
    found, _, said = verdict(watched(*lost, row("g0", logprobs=None), row("none"), row("g1", canary_kind=None)))
    assert found == "same" and "1 without logprobs, 20 of 22 unanswered" in said


def test_many_small_movements_are_drift_and_few_of_them_large_still_are() -> None:
    """What 4-bit weights do: of 21 that changed, one moved by more than 4 nats."""
    small = [row(f"g{n}", tokens=changed(0.5)) for n in range(19)]
    watch = watched(*small, row("g19", tokens=changed(1.2)), row("g20", tokens=changed(1.3)))
    assert watch.broken.alarm_at is not None and watch.broken.wrong == 2, "by count alone it would be called broken"
    assert verdict(watch)[0] == "numeric drift"
    assert watch.odd()[:2] == ["g19", "g20"]
    assert verdict(watched(*(row(f"g{n}", tokens=changed(5.0)) for n in range(3))))[0] == "broken"


def broken_at(*places: str) -> CanaryWatch:
    rows = [
        row(f"g{n}", place, tokens=changed(9.0) if place in places else None, cached_tokens=0 if place == "miss" else 4)
        for n in range(6)
        for place in ("miss", "hit", "plain")
    ]
    return watched(*rows)


@pytest.mark.parametrize(
    ("places", "kind", "words"),
    [
        (("miss", "hit", "plain"), "golden", "alarm at canary"),
        (("hit", "plain"), "cache", "only on hits of the prefix cache"),
        (("plain",), "streaming", "only where the answer is not streamed"),
        (("miss", "hit"), "streaming", "only where the answer is streamed"),
    ],
)
def test_pairs_tell_where_it_breaks(places: tuple[str, ...], kind: str, words: str) -> None:
    watch = broken_at(*places)
    assert verdict(watch)[:2] == ("broken", kind) and words in verdict(watch)[2]
    counts = watch.pairs()["place"]
    assert {name for name, one in counts.items() if one["broken"]} == set(places)


def test_a_hit_is_what_the_server_says_is_one() -> None:
    """A miss that met the cache all the same is a hit; a hit whose pages were gone is none."""
    watch = watched(row("g0", "miss", cached_tokens=16), row("g1", "hit", cached_tokens=0), row("g2", "hit"))
    assert [one.place for one in watch.seen] == ["hit", "miss", "hit"]
    spoilt = {"plain": {"tokens": changed(9.0), "cached_tokens": 9}}
    early = [
        row(f"g{n}", place, **spoilt.get(place, {"cached_tokens": 0}))
        for n in range(4)
        for place in ("miss", "hit", "plain")
    ]
    assert verdict(watched(*early))[1] == "cache", "the second came before the first had ended; the third was a hit"


def test_one_bad_replica_is_named() -> None:
    rows = [row(f"g{n}", target=f"http://{'ab'[n % 2]}", tokens=changed(9.0) if n % 2 else None) for n in range(12)]
    watch = watched(*rows)
    assert "; only on http://b" in verdict(watch)[2]
    assert watch.pairs()["replica"]["http://b"] == {"same": 0, "numeric": 0, "broken": 6}


def test_answers_that_do_not_end_and_answers_of_nothing_have_their_own_kinds() -> None:
    longer = [*map(entry, TOKENS), entry(" on"), entry(" on")]
    rows = [row(f"g{n}", tokens=longer) for n in range(6)]
    assert verdict(watched(*rows, ended=True))[:2] == ("broken", "no-end")
    assert verdict(watched(*rows))[0] == "same", "a golden that was cut says nothing of the end"
    silent = {"tokens": [], "output_chars": 0, "finish_reason": "stop"}
    pages = [row(f"g{n}", place, **(silent if place == "hit" else {})) for n in range(6) for place in ("miss", "hit")]
    assert verdict(watched(*pages))[:2] == ("broken", "cache")
    empty = [row(f"g{n}", tokens=[], output_chars=0, finish_reason="stop") for n in range(6)]
    assert verdict(watched(*empty))[:2] == ("broken", "empty")


def test_draws_at_a_high_temperature_must_differ() -> None:
    def drawn(*shas: str) -> list[tuple[str, str]]:
        rows = [row("hot", "hot", canary_kind="sampling", output_sha=sha) for sha in shas]
        return [(one.verdict, one.kind) for one in watched(*rows).findings()[1:]]

    assert drawn("x", "x", "x") == [("broken", "sampling")]
    assert drawn("x", "x", "y") == [("same", "sampling")]
    assert drawn("x", "x") == []


def test_a_golden_that_stays_broken_is_one_piece_of_evidence_on_each_replica() -> None:
    again = [row("g0", tokens=changed(9.0)) for _ in range(9)]
    watch = watched(*again)
    assert (watch.broken.seen, watch.broken.wrong, watch.alarm) == (1, 1, None)
    watch.take([row("g0", tokens=changed(9.0), target="http://b"), row("g1", tokens=changed(9.0))])
    assert watch.broken.wrong == 3 and watch.alarm == "broken"
