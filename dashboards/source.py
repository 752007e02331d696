"""A run bundle as tables that DuckDB reads where they lie: the Parquet of a finished run, the parts of a live one.

Owns: the views ``requests``, ``verdicts``, ``steps``, ``series``, ``spans`` and ``rows`` (facts and verdict of each
request joined by index, with its times).  Must always hold: only the columns that a question names are read; a column
that an old bundle lacks is null; nothing is written to the bundle but the verdicts that ``Bundle.verdicts`` keeps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from telemetry import names, slo
from telemetry.bundle import Bundle
from telemetry.parts import DATA_FILE
from telemetry.schema import TABLES

Rows = list[dict[str, Any]]

_TYPES: Final = {
    pa.int16(): "SMALLINT", pa.int32(): "INTEGER", pa.int64(): "BIGINT", pa.float32(): "FLOAT", pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR", pa.bool_(): "BOOLEAN",
}  # fmt: skip

#: Seconds of each part of a request as SQL over the requests table; the parts of ``telemetry.phases.E2E_PARTS``.
PART_SQL: Final = {
    names.CLIENT_WAIT: "(sent_s - intended_s)",
    names.NETWORK: "(end_s - sent_s - server_duration_s)",
    **{name: f"phase_{name}_s" for name in names.PHASES},
}
_LARGEST: Final = f"greatest({', '.join(PART_SQL.values())})"
#: The part that took most of an answered request; null where the server gives no account.
DOMINANT_SQL: Final = (
    f"CASE WHEN server_duration_s IS NULL OR label = '{names.DROPPED}' THEN NULL "
    + " ".join(f"WHEN {sql} >= {_LARGEST} THEN '{name}'" for name, sql in PART_SQL.items())
    + " END"
)
_ROWS: Final = f"""
    CREATE TEMP VIEW rows AS SELECT requests.*, answered, correct, label, reason, late, late_kind, wrong_kind, verified,
        end_s - intended_s AS e2e_s, first_token_s - intended_s AS ttft_s, {DOMINANT_SQL} AS phase
    FROM requests JOIN verdicts USING ("index")
"""
_WORD: Final = re.compile(r"\b(rows|requests|verdicts|steps|series|spans)\b")


@dataclass(frozen=True)
class Source:
    """One run under one SLO.  Made with ``open_source``."""

    bundle: Bundle
    policy: slo.Slo

    @cached_property
    def verdicts(self) -> pa.Table:
        """One row per request, as the command line judges."""
        return self.bundle.verdicts(self.policy)

    def ask(self, sql: str, **values: Any) -> Rows:
        """Run one SELECT over the views that it names.  values: parameters, written ``$name``."""
        found = self._run(sql, values)
        columns = [column[0] for column in found.description]
        return [dict(zip(columns, row, strict=True)) for row in found.fetchall()]

    def table(self, sql: str, **values: Any) -> pa.Table:
        """The same as an Arrow table."""
        return self._run(sql, values).to_arrow_table()

    def has(self, table: str) -> bool:
        """Whether the bundle holds any row of a table."""
        return bool(self.ask(f"SELECT 1 FROM {table} LIMIT 1"))

    def _run(self, sql: str, values: dict[str, Any]) -> Any:
        base = duckdb.connect(":memory:", config={"threads": 2})
        named = set(_WORD.findall(sql))
        if "rows" in named:
            named |= {"requests", "verdicts"}
        for name in sorted(named & TABLES.keys()):
            self._view(base, name)
        if "verdicts" in named:
            base.register("verdicts", self.verdicts)
        if "rows" in named:
            base.execute(_ROWS)
        used = {name: value for name, value in values.items() if re.search(rf"\${name}\b", sql)}
        return base.execute(sql, used)

    def _view(self, base: duckdb.DuckDBPyConnection, name: str) -> None:
        folder = self.bundle.path / name
        files = [file.name for file in folder.glob("[!.]*")] if folder.is_dir() else []
        if files != [DATA_FILE]:  # parts of a run that goes, or that was cut: few enough to read whole
            base.register(name, self.bundle.table(name))
            return
        path = folder / DATA_FILE
        present = set(pq.read_schema(path).names)
        columns = [
            f'"{field.name}"' if field.name in present else f'NULL::{_sql_type(field.type)} AS "{field.name}"'
            for field in TABLES[name]
        ]
        quoted = str(path).replace("'", "''")
        base.execute(f"CREATE TEMP VIEW {name} AS SELECT {', '.join(columns)} FROM read_parquet('{quoted}')")


def open_source(path: Path, policy: slo.Slo | None = None) -> Source:
    """The run at ``path`` under its own SLO, or under ``policy``.  UserError when it cannot be read."""
    bundle = Bundle.open(path)
    return Source(bundle, policy or slo.of_manifest(bundle.manifest))


def _sql_type(kind: pa.DataType) -> str:
    return f"{_sql_type(kind.value_type)}[]" if pa.types.is_list(kind) else _TYPES[kind]
