"""What a sender notes of the requests that ended, on its way to becoming rows: packed, in files, one after another.

A row with its share of a record batch costs several times what packing its facts does, and holds the interpreter
meanwhile.  So the sender packs, and a process of its own makes the rows (`loadgen.recorder`).  Owns the files: segments
of MessagePack objects, each segment beginning with what all of its rows have in common.  Must always hold:
  * what was put is read exactly once, in its order; a segment goes when its rows are safe (`SpoolReader.forget`);
  * the event loop writes nothing to the disk: a thread does, and a full disk costs no record;
  * a torn last record costs itself alone;
  * where no text may reach the disk, segments lie in memory (`folder_for`).
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Protocol

import msgpack

from loadgen.failure import Failure
from loadgen.job import Call
from loadgen.stream import Answer
from models.errors import UserError

FOLDER: Final = "spool"  # of a bundle; in it a folder for each sender
LOCK: Final = "lock"  # held by whoever reads the folder
SUFFIX: Final = ".msgpack"
VERSION: Final = 1
BLOB_BYTES: Final = 64 << 10  # packed before the thread gets it
SEGMENT_BYTES: Final = 8 << 20
READ_BYTES: Final = 256 << 10
LONGEST: Final = 512 << 20  # of one record; the answers themselves are limited far below
_DEEPEST: Final = 64  # of JSON that cannot be packed as it is
_MEMORY: Final = Path("/dev/shm")

#: What a row takes from a call; the body and the target are of the sending.
CALL_FIELDS: Final = tuple(one.name for one in fields(Call) if one.name not in ("body", "path", "target"))
#: What a row takes from an answer that has ended, beside its failure.
ANSWER_FIELDS: Final = (
    "account", "cached_tokens", "completion_tokens", "done_marker", "end_ns", "fingerprint", "finish_reason",
    "first_chunk_ns", "first_content_ns", "headers_ns", "logprobs", "model", "pieces", "prompt_tokens",
    "reasoning_tokens", "replica", "request_id", "response_id", "retry_after_s", "stamps", "status", "streamed",
    "usage_marks",
)  # fmt: skip
#: What a row takes from the sending.
SENDING_FIELDS: Final = (
    "target", "replica", "attempts", "start_ns", "first_start_ns", "sent_ns", "connect_ns", "reused",
)  # fmt: skip

_of_call: Final = attrgetter(*CALL_FIELDS)
_of_answer: Final = attrgetter(*ANSWER_FIELDS)
_of_sending: Final = attrgetter(*SENDING_FIELDS)
_SCRIPTS: Final = CALL_FIELDS.index("input_scripts")
_UNPACKING: Final[dict[str, Any]] = {
    "strict_map_key": False, "unicode_errors": "surrogatepass", "max_buffer_size": LONGEST,
}  # fmt: skip

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Common:
    """What the rows of a sender have in common: how they are made, and the run's zero (CLOCK_MONOTONIC, ns)."""

    worker: int
    model: str | None  # that the bodies ask for
    keep_text: str
    tokenizer_ref: str
    zero_ns: int = 0


class Ended(Protocol):
    """What is needed of a request that ended (loadgen.flight.Flight, or what was Kept of it); stamps as there."""

    @property
    def call(self) -> Call: ...
    @property
    def answer(self) -> Answer: ...
    @property
    def target(self) -> str: ...
    @property
    def replica(self) -> str | None: ...
    @property
    def attempts(self) -> int: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def first_start_ns(self) -> int: ...
    @property
    def sent_ns(self) -> int | None: ...
    @property
    def connect_ns(self) -> int | None: ...
    @property
    def reused(self) -> bool | None: ...


@dataclass(slots=True)
class Kept:
    """A request as it comes out of a segment; the names are those of a flight."""

    call: Call
    answer: Answer
    target: str
    replica: str | None
    attempts: int
    start_ns: int
    first_start_ns: int
    sent_ns: int | None
    connect_ns: int | None
    reused: bool | None


def folder_for(bundle: Path, name: str, keep_text: str) -> Path:
    """Where the segments of a sender go: a folder of the bundle, or what it links to in memory where no text is kept.

    Without /dev/shm (no Linux) that is the folder for temporary files.
    """
    place = bundle / FOLDER / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if keep_text == "none":
        memory = _MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else None
        place.symlink_to(tempfile.mkdtemp(prefix="tailspan-spool-", dir=memory), target_is_directory=True)
    else:
        place.mkdir()
    return place


class Spool:
    """The sender's half.  Not thread-safe: one owner."""

    def __init__(self, folder: Path, common: Common, on_written: Callable[[], None] = lambda: None) -> None:
        """on_written: called, by the thread, when there is more to read."""
        self.error: str | None = None  # why records cannot be written at present; they stay in memory
        self._folder = folder
        self._common = common
        self._on_written = on_written
        self._pack: Callable[[Any], bytes] = msgpack.Packer(unicode_errors="surrogatepass").pack
        self._packed: list[bytes] = []
        self._packed_bytes = 0
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()  # guards the next two
        self._blobs: deque[bytes] = deque()
        self._ending = False
        self._fd = -1  # the rest is the thread's
        self._segment = 0
        self._size = 0

    def start(self, zero_ns: int) -> None:
        """zero_ns: the run's zero on CLOCK_MONOTONIC.  Before the first `put`."""
        self._common = replace(self._common, zero_ns=zero_ns)
        self._thread = threading.Thread(target=self._write, name="spool", daemon=True)
        self._thread.start()

    def put(self, ended: Ended) -> None:
        """Note a request that ended."""
        call = _of_call(ended.call)
        if call[_SCRIPTS] is not None:
            call = (*call[:_SCRIPTS], sorted(call[_SCRIPTS]), *call[_SCRIPTS + 1 :])
        failure = ended.answer.failure
        told = None if failure is None else (failure.reason, failure.detail)
        self._add((call, _of_answer(ended.answer), told, _of_sending(ended)))

    def put_attempt(self, row: Row) -> None:
        """Note an attempt that ended: its row, as telemetry.schema.ATTEMPTS has it."""
        self._add(row)

    def flush(self) -> None:
        """Give what is packed to the thread that writes."""
        if not self._packed:
            return
        blob = b"".join(self._packed)
        self._packed.clear()
        self._packed_bytes = 0
        with self._wake:
            self._blobs.append(blob)
            self._wake.notify()

    def close(self) -> None:
        """Write what is left.  Raises UserError where that fails: those requests will have no row."""
        self.flush()
        if self._thread is not None:
            with self._wake:
                self._ending = True
                self._wake.notify()
            self._thread.join()
            self._thread = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._blobs:
            raise UserError(
                f"requests could not be noted: {self.error}",
                where=str(self._folder),
                remedy="free space on that disk; all requests before these have their rows",
            )

    def _add(self, record: Any) -> None:
        try:
            packed = self._pack(record)
        except (OverflowError, ValueError, TypeError):
            packed = self._pack(_packable(record))
        self._packed.append(packed)
        self._packed_bytes += len(packed)
        if self._packed_bytes >= BLOB_BYTES:
            self.flush()

    # --- the thread ---
    def _write(self) -> None:
        while True:
            with self._wake:
                while not self._blobs and not self._ending:
                    self._wake.wait()
                if not self._blobs:
                    return
                blob, last = self._blobs[0], self._ending
            try:
                self._append(blob)
            except OSError as problem:
                self.error = problem.strerror or str(problem)
                if last:
                    return
                with self._wake:
                    if not self._ending:
                        self._wake.wait(1.0)  # then try again
                continue
            self.error = None
            with self._wake:
                self._blobs.popleft()
            self._on_written()

    def _append(self, blob: bytes) -> None:
        """Write it at the end of the last segment, or begin the next; all or nothing.  Raises OSError."""
        if self._fd < 0 or self._size >= SEGMENT_BYTES:
            fd = os.open(self._path(self._segment + 1), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._size = fd, 0
            self._segment += 1
        if not self._size:
            blob = bytes(msgpack.packb({"version": VERSION, **asdict(self._common)})) + blob
        done = 0
        try:
            while done < len(blob):
                done += os.pwrite(self._fd, blob[done:], self._size + done)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += done

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}{SUFFIX}"


class SpoolReader:
    """The other half: what is there now, and what comes later.  common: of the segment read last."""

    def __init__(self, folder: Path) -> None:
        self.common: Common | None = None
        self._folder = folder
        self._file: int = -1
        self._path: Path | None = None
        self._unpacker: msgpack.Unpacker | None = None
        self._read: list[Path] = []  # to their ends

    def records(self) -> Iterator[Kept | Row]:
        """Requests, and the rows of attempts, up to the end of what is written at present.

        Raises ValueError or TypeError: something that a spool of this version does not hold.
        """
        while True:
            if self._unpacker is None and not self._open_next():
                return
            assert self._unpacker is not None
            yield from self._unpacked()  # what an earlier call was not asked for to the end
            # Asked before the last read: what is written to this segment later would be behind the next one's birth.
            follower = self._following()
            while data := os.read(self._file, READ_BYTES):
                self._unpacker.feed(data)
                yield from self._unpacked()
            if follower is None:
                return
            self._end()

    def forget(self) -> None:
        """Remove the segments that were read whole: their rows are safe."""
        for path in self._read:
            path.unlink(missing_ok=True)
        self._read.clear()

    def close(self) -> None:
        """Nothing more is read."""
        if self._unpacker is not None:
            self._end()

    def _unpacked(self) -> Iterator[Kept | Row]:
        assert self._unpacker is not None
        for record in self._unpacker:
            if self.common is None:
                if not isinstance(record, dict) or record.pop("version", None) != VERSION:
                    raise ValueError(f"{self._path} is no segment of this version")
                self.common = Common(**record)
            else:
                yield record if isinstance(record, dict) else kept(record)

    def _open_next(self) -> bool:
        path = self._following()
        if path is None:
            return False
        self._file, self._path, self.common = os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, None
        self._unpacker = msgpack.Unpacker(**_UNPACKING)
        return True

    def _following(self) -> Path | None:
        """The segment behind the one that is open, or was last."""
        known = self._path
        return min(
            (one for one in self._folder.glob(f"*{SUFFIX}") if known is None or one.name > known.name), default=None
        )

    def _end(self) -> None:
        assert self._path is not None
        os.close(self._file)
        self._read.append(self._path)
        self._unpacker = None


def kept(record: Any) -> Kept:
    """A request as `Spool` packed it.  Raises TypeError or ValueError for anything else."""
    of_call, of_answer, told, of_sending = record
    values = dict(zip(CALL_FIELDS, of_call, strict=True))
    if values["input_scripts"] is not None:
        values["input_scripts"] = frozenset(values["input_scripts"])
    answer = Answer()
    for name, value in zip(ANSWER_FIELDS, of_answer, strict=True):
        setattr(answer, name, value)
    answer.failure = None if told is None else Failure(*told)
    return Kept(Call(body=b"", path="", **values), answer, *of_sending)


def _packable(value: Any, depth: int = 0) -> Any:
    """JSON that fits: whole numbers beyond 64 bits, which no column takes, as floats, and nothing at all too deep."""
    if depth > _DEEPEST:
        return None
    if isinstance(value, dict):
        return {str(key): _packable(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_packable(one, depth + 1) for one in value]
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        try:
            return float(value)
        except OverflowError:
            return None
    return value
