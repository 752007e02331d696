"""Beside production, for days: spans, metrics and canaries into windows, verdicts, and a comparison on a breach.

``tick`` is called again and again with the time; everything that is due is done in it, on one thread.  Spans come on
the receiver's threads and are only queued there.  Must always hold: memory is bounded (the queue, the last look, one
scrape); disk is bounded (retention); whatever the target does, the watch goes on.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from loadgen.preflight import Target
from loadgen.scrape import newest_steps
from loadgen.watch.canary import Canaries
from loadgen.watch.explained import window_of
from loadgen.watch.retention import Retention
from loadgen.watch.verdict import Breach, Breaches, Look, Recent
from loadgen.watch.window import OpenWindow
from loadgen.way import DIRECT, Way
from models.errors import UserError
from telemetry.bundle import Bundle
from telemetry.parts import write_atomically
from telemetry.receiver import Receiver
from telemetry.slo import Slo

ENOUGH: Final = 120  # requests of the bad time that a comparison of windows needs (telemetry.compare asks for 100)
GOOD_LOOKS: Final = 5  # looks of the last good time that a comparison takes, at most
QUEUE: Final = 100_000  # spans between two ticks
REMEMBERED: Final = 200_000  # ids of spans
BREACH_FILE: Final = "breach.json"
#: (bundle of the good window, its bounds) and the bad one -> what is said of them; plain JSON, and Markdown.
Explain = Callable[[tuple[Bundle, float, float], tuple[Bundle, float, float]], tuple[dict[str, Any], str]]


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds, counts, bytes.  keep: closed windows.  breaches: folders of breaches that are kept."""

    root: Path
    period_s: float = 3600.0
    keep: int = 48
    disk_bytes: int = 4 << 30
    look_s: float = 60.0
    judge_s: float = 10.0
    scrape_s: float = 5.0
    canary_s: float = 30.0
    breaches: int = 20
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    way: Way = DIRECT


@dataclass(slots=True)
class Called:
    """A breach whose comparison is to be made.  rows: requests since it began.  compared: once already."""

    breach: Breach
    folder: Path
    rows: int
    compared: bool = False


class Watch:
    """start(), tick(now_s, now_unix_ns) as often as wished, stop().  now_s: monotonic seconds of the caller's clock."""

    def __init__(
        self,
        server: Target,
        slo: Slo,
        settings: Settings,
        explain: Explain,
        *,
        canaries: Canaries | None = None,
        otlp_port: int = 0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._server, self._slo, self._settings, self._explain, self._say = server, slo, settings, explain, say
        self.canaries = canaries
        self._queued: deque[dict[str, Any]] = deque(maxlen=QUEUE)
        self._lock = threading.Lock()
        self._known: dict[str, None] = {}  # ids of spans that were taken, the oldest first
        self.receiver = Receiver(settings.root / "early", port=otlp_port, on_rows=self._heard)
        self.breaches, self.retention = Breaches(), Retention(settings.keep, settings.disk_bytes)
        self._recent = Recent(slo, settings.look_s)
        self.look: Look | None = None
        self.window: OpenWindow | None = None
        self._opened_s = self._judge_at = self._canary_at = 0.0
        self._span_at: float | None = None
        self._steps: dict[str, int] = {}  # the newest that are in a closed window
        self._started_s = 0.0
        self._now_s = 0.0
        self._closed: deque[tuple[Path, float, float]] = deque(maxlen=8)  # (path, opened, closed) of the last windows
        self._pinned: deque[tuple[Path, frozenset[str]]] = deque()  # breach folder, its windows
        self._called: Called | None = None
        self._canary_breach: Breach | None = None

    @property
    def silence_s(self) -> float:
        """Seconds since a request's span came; since the start where none did."""
        return self._now_s - (self._started_s if self._span_at is None else self._span_at)

    # --- life ---
    def start(self, now_s: float, now_unix_ns: int) -> None:
        """Listen, and open the first window.  Raises UserError when the port is taken."""
        self.receiver.start()
        self._started_s = self._now_s = now_s
        self._steps = newest_steps([self._server.url], self._settings.headers, self._settings.way)
        self._judge_at, self._canary_at = now_s + self._settings.judge_s, now_s
        self._open(now_s, now_unix_ns)

    def tick(self, now_s: float, now_unix_ns: int) -> None:
        """Do what is due."""
        self._now_s = now_s
        self._drain(now_s)
        if self.canaries is not None and now_s >= self._canary_at:
            self._canary_at = now_s + self._settings.canary_s
            self._ask(now_s)
        if now_s >= self._judge_at:
            self._judge_at = now_s + self._settings.judge_s
            self._judge(now_s, now_unix_ns)
        self._compare_if_due(now_s, now_unix_ns)
        pending = self._called is not None and not self._called.compared  # its bad time belongs into one window
        if now_s - self._opened_s >= self._settings.period_s and not pending:
            self._roll(now_s, now_unix_ns)

    def stop(self, now_s: float) -> None:
        """Close the window that is open, and everything else."""
        self._drain(now_s)
        self._close(now_s)
        self.receiver.stop()
        shutil.rmtree(self._settings.root / "early", ignore_errors=True)  # spans that came when no window was open

    # --- what comes in ---
    def _heard(self, rows: list[dict[str, Any]]) -> None:
        with self._lock:
            self._queued.extend(rows)

    def _drain(self, now_s: float) -> None:
        with self._lock:
            spans = [one for one in self._queued if self._is_new(one["span_id"])]
            self._queued.clear()
        if not spans or self.window is None:
            return
        rows = self.window.take(spans, self.canaries.traces if self.canaries is not None else frozenset())
        if rows:
            self._span_at = now_s
            self._recent.add(now_s, rows)
            if self._called is not None:
                self._called.rows += len(rows)

    def _is_new(self, span_id: str) -> bool:
        """An exporter that had no answer in time sends its spans again."""
        if span_id in self._known:
            return False
        self._known[span_id] = None
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        return True

    def _ask(self, now_s: float) -> None:
        assert self.canaries is not None and self.window is not None
        self.window.add(self.canaries.ask(self.window.target, self.window.zero_unix_ns))

    # --- verdicts ---
    def _judge(self, now_s: float, now_unix_ns: int) -> None:
        self.look = self._recent.look(now_s)
        breach = None if self._canary_breach is not None else self.breaches.see(self.look)
        alarm = self.canaries.alarm if self.canaries is not None else None
        if alarm is not None and self._canary_breach is None and self.breaches.now is None:
            breach = self._canary_breach = self.breaches.call(Breach(now_s - self._settings.look_s, now_s, alarm))
        elif alarm is None and self._canary_breach is not None:
            self._canary_breach.until_s = now_s
            self._canary_breach = self.breaches.now = None
        if breach is None:
            return
        folder = self._settings.root / "breaches" / f"{now_unix_ns // 10**9}"
        self._say(f"BREACH {breach.reason} (since {now_s - breach.from_s:.0f} s); {folder}")
        self._called = Called(breach, folder, self._recent.count_since(breach.from_s))
        self._write(
            folder, {"reason": breach.reason, "target": self._server.url}, "\nToo few requests yet to compare.\n"
        )

    def _compare_if_due(self, now_s: float, now_unix_ns: int) -> None:
        """As soon as there are enough requests to compare, and once more with more of the bad time."""
        called, look_s = self._called, self._settings.look_s
        if called is None:
            return
        waited = now_s - called.breach.seen_s
        if not called.compared and (called.rows >= ENOUGH or waited >= 2 * look_s or called.breach.until_s is not None):
            called.compared = True
        elif waited >= 4 * look_s:
            self._called = None
        else:
            return
        self._compare(called.breach, called.folder, now_s, now_unix_ns)

    def _compare(self, breach: Breach, folder: Path, now_s: float, now_unix_ns: int) -> None:
        """Close the window, and put the last good stretch beside the bad one."""
        end_s = breach.until_s or now_s
        good = self.breaches.last_good
        if breach.until_s is not None and good is not None and good[1] > breach.from_s:
            good = None  # it held again since: what was good before stands in the first comparison
        self._roll(now_s, now_unix_ns)
        found: dict[str, Any] = {
            "reason": breach.reason,
            "from_unix_ns": now_unix_ns - round((now_s - breach.from_s) * 1e9),
            "seen_unix_ns": now_unix_ns - round((now_s - breach.seen_s) * 1e9),
            "target": self._server.url,
        }
        bad_part = self._part(breach.from_s, end_s)
        good_part = (
            None
            if good is None
            else self._part(max(good[0], good[1] - GOOD_LOOKS * self._settings.look_s), min(good[1], breach.from_s))
        )
        text = ""
        windows: set[str] = set()
        for name, part in (("good", good_part), ("bad", bad_part)):
            if part is not None:
                windows.add(part[0].path.name)
                found[name] = {"run": str(part[0].path), "start_s": part[1], "end_s": part[2]}
        if good_part is None or bad_part is None:
            text += "\nThere is no stretch that held beside it, so there is nothing to compare with.\n"
        else:
            try:
                found["explanation"], said = self._explain(good_part, bad_part)
                text += f"\nTwo stretches of production, without a replay: approximate.\n\n{said}\n"
            except UserError as error:
                found["explanation"], text = None, text + f"\nNot explained: {error}\n"
            command = (
                f"tailspan explain {good_part[0].path} {bad_part[0].path} --window {window_of(good_part, bad_part)}"
            )
            text += f"\n    {command}\n"
        self._write(folder, found, text)
        self._pin(folder, frozenset(windows))

    @staticmethod
    def _write(folder: Path, found: dict[str, Any], text: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / BREACH_FILE, json.dumps(found, indent=1).encode())
        write_atomically(folder / "breach.md", f"# Breach: {found['reason']}\n{text}".encode())

    def _part(self, start_s: float, end_s: float) -> tuple[Bundle, float, float] | None:
        """The closed window that holds most of a stretch of the watch's clock, and its bounds in that window."""
        best, most = None, 0.0
        for path, opened, closed in self._closed:
            low, high = max(start_s, opened), min(end_s, closed)
            if high - low > most:
                best, most = (path, low - opened, high - opened), high - low
        return None if best is None else (Bundle.open(best[0]), best[1], best[2])

    def _pin(self, folder: Path, windows: frozenset[str]) -> None:
        self._pinned = deque(one for one in self._pinned if one[0] != folder)
        self._pinned.append((folder, windows))
        while len(self._pinned) > self._settings.breaches:
            old, _ = self._pinned.popleft()
            for name in (BREACH_FILE, "breach.md"):
                (old / name).unlink(missing_ok=True)
            old.rmdir()

    # --- windows ---
    def _open(self, now_s: float, now_unix_ns: int) -> None:
        self._opened_s = now_s
        self.window = OpenWindow(
            self._settings.root / "windows",
            self._server.url,
            self._slo,
            self.receiver,
            zero_unix_ns=now_unix_ns,
            zero_ns=round(now_s * 1e9),
            server=self._server.to_dict(),
            headers=self._settings.headers,
            way=self._settings.way,
            metrics_path=self._server.metrics_path,
            scrape_s=self._settings.scrape_s,
            after=self._steps,
        )

    def _roll(self, now_s: float, now_unix_ns: int) -> None:
        """Close the window and open the next; spans that come meanwhile wait in the queue."""
        before = self.window
        opened = self._opened_s
        self._steps = before.hush() if before is not None else self._steps
        self._open(now_s, now_unix_ns)
        if before is not None:
            self._finish(before, opened, now_s)

    def _close(self, now_s: float) -> None:
        if self.window is not None:
            before, self.window = self.window, None
            before.hush()
            self.receiver.switch(self._settings.root / "early")
            self._finish(before, self._opened_s, now_s)

    def _finish(self, window: OpenWindow, opened_s: float, now_s: float) -> None:
        summary = window.close(now_s - opened_s)
        self._closed.append((window.bundle.path, opened_s, now_s))
        pinned = frozenset(name for _, names in self._pinned for name in names)
        good = self.breaches.last_good
        since = now_s if good is None else good[1] - GOOD_LOOKS * self._settings.look_s
        # what the next comparison may need: the newest, and the last good time
        keep = pinned | {path.name for path, _, closed in self._closed if closed >= min(since, now_s)}
        self.retention.closed(window.bundle.path, keep)
        self._say(f"window {window.bundle.run_id}: {summary.sentence}")
