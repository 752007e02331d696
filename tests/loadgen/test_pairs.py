"""`tailspan run --repeats K --against URL`: whose turn it is, what is shared, what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.options import Options
from loadgen.pairs import MOST, Pairs
from models.errors import UserError
from telemetry.bundle import Bundle
from telemetry.compare import resolve_sides
from tests.bundles import make_bundle
from tests.loadgen.place import Place, chats, script
from tests.loadgen.stub import StubThread


def test_two_servers_get_the_same_prompts_in_turn(place: Place, model: Path) -> None:
    with StubThread(script(model)) as a, StubThread(script(model)) as b:
        code, out, err = place.run(a.url, "--seed", "3", "--duration", "0.5", "--against", b.url, "--json")
        assert code == 3, err  # eight requests are too few for a verdict
        compared = json.loads(out.splitlines()[-1])
        prompts = [sorted(one.json["messages"][0]["content"] for one in chats(stub)) for stub in (a, b)]
    assert prompts[0] == prompts[1] and len(set(prompts[0])) == len(prompts[0]) > 3
    assert compared["same_load"] and compared["refusals"][0]["kind"] == "too_few_requests"
    left, right = resolve_sides(compared["group"], None, place.runs)
    group = {"id": compared["group"], "pair": 0, "pairs": 1}
    assert [one.manifest["group"] for one in (*left, *right)] == [{**group, "side": "A"}, {**group, "side": "B"}]
    assert left[0].manifest["created_unix_ns"] < right[0].manifest["created_unix_ns"]


def test_one_server_is_never_asked_the_same_twice() -> None:
    pairs = Pairs(Options(targets="http://x", repeats=2), "http://x", None)
    assert [place.salt for _, place in pairs.turns()] == [None] * 4
    other = Pairs(Options(targets="http://x", repeats=2), "http://y", None)
    turns = list(other.turns())
    assert [asked.targets for asked, _ in turns] == ["http://x", "http://y"] * 2
    salts = [place.salt for _, place in turns]
    assert salts[0] == salts[1] != salts[2] == salts[3]


def test_pairs_go_on_until_they_are_enough(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, 150, 4)
    twin = make_bundle(tmp_path, 150, 4)

    def count(find: float | None, **options: int) -> int:
        pairs = Pairs(Options(targets="http://x", runs=str(tmp_path), **options), "http://y", find)
        n = 0
        for _, place in pairs.turns():
            pairs.ended(place, bundle if place.side == "A" else twin)
            n += 1
        assert len(json.loads((tmp_path / "groups" / f"{pairs.group}.json").read_text())["a"]) == n // 2
        return n

    assert count(None, repeats=3) == 6
    assert count(0.1) == 12, "two equal runs have no noise: the least number of pairs is enough"
    for options, where in (({"find": -1.0}, "--find"), ({"find": 0.1, "repeats": 4}, "--repeats")):
        find = options.pop("find")
        with pytest.raises(UserError, match=where):
            Pairs(Options(**options), "http://y", find)
    assert Pairs(Options(), "http://y", 0.1).most == MOST


def test_a_pair_that_is_not_complete_is_left_out(tmp_path: Path) -> None:
    pairs = Pairs(Options(targets="http://x", runs=str(tmp_path), repeats=2), "http://y", None)
    first, second = make_bundle(tmp_path, 30, 4), make_bundle(tmp_path, 30, 5)
    turns = [place for _, place in pairs.turns()]
    pairs.ended(turns[0], first)
    assert pairs.comparison() is None
    with pytest.raises(UserError, match="no complete pair"):
        resolve_sides(pairs.group, None, tmp_path)
    pairs.ended(turns[1], second)
    pairs.ended(turns[2], Bundle.open(first.path))
    a, b = resolve_sides(pairs.group, None, tmp_path)
    assert len(a) == len(b) == 1
