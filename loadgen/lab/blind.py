"""Training people on call: a fault that is drawn and injected without telling, and revealed after an answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Final

from loadgen.lab.scenario import VIRTUAL, check_verdict, shipped
from loadgen.lab.trial import record
from loadgen.pairs import Pairing
from models.errors import UserError
from telemetry import slo
from telemetry.bundle import Bundle
from telemetry.compare.sides import write_group
from telemetry.parts import write_atomically
from telemetry.twin import Twin

_REMEDY: Final = "make one with `tailspan lab blind`, or name the file that it printed with --truth"


def inject(
    twin: Twin, root: Path, truth: Path, *, seed: int, pairs: int, requests: int
) -> tuple[str, list[Bundle], list[Bundle]]:
    """Draw a scenario, a load and a size; returns the trial's name and the bundles of both sides.

    What it was goes into the file ``truth`` alone, beside what earlier trials were.
    """
    draw = random.Random(f"lab blind {seed}")
    # one fault each: an answer names one cause
    scenario = draw.choice([one for one in shipped() if VIRTUAL in one.ways and not one.then])
    load = draw.choice(scenario.loads)
    name = f"{draw.getrandbits(32):08x}"
    a, b, size = record(
        scenario, twin, slo.load("chat"), root / name, load=load, seed=seed, pairs=pairs, requests=requests
    )
    for side, found in (("A", a), ("B", b)):  # the pages then show all pairs
        for pair, bundle in enumerate(found):
            bundle.update(group=Pairing(name, side, pair, len(found), None).to_dict())
    write_group(name, [one.run_id for one in a], [one.run_id for one in b], root / name)
    known = _read(truth) if truth.exists() else {}
    known[name] = {"scenario": scenario.to_dict(), "load": load, "size": size}
    truth.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(truth, json.dumps(known, indent=1).encode())
    return name, a, b


def reveal(name: str, said: tuple[str, str], truth: Path) -> str:
    """What it was, and whether the answer was right.  Raises UserError for a trial, class or cause not known."""
    known = _read(truth)
    check_verdict(*said, where="tailspan lab reveal")
    if name not in known:
        raise UserError(f"no trial {name!r}", where=str(truth), remedy=f"one of {', '.join(known)}")
    was = known[name]["scenario"]
    right = said == (was["label"], was["cause"])
    half = said[0] == was["label"]
    word = "right" if right else "the class is right, the cause is not" if half else "wrong"
    trap = f"; easily taken for {was['trap']}" if was["trap"] else ""
    return f"{word}: {was['id']}, {was['title']}: {was['label']} · {was['cause']}{trap}"


def _read(truth: Path) -> dict[str, Any]:
    try:
        found = json.loads(truth.read_bytes())
    except FileNotFoundError:
        raise UserError("no blind trial is known here", where=str(truth), remedy=_REMEDY) from None
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or "it is no JSON"
        raise UserError(f"cannot be read: {said}", where=str(truth), remedy=_REMEDY) from None
    return dict(found)
