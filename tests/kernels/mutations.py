"""Deliberate one-line faults in the kernels and around them: each must be caught by the test beside it.

    python -m tests.kernels.mutations [NAME ..]        (``make accept-mutations``; a few minutes)

The tree is copied into a temporary folder; each fault is put into the copy by exact replacement, its test runs there,
and must fail.  What is listed here is what the suite is known to see:

    a mask off by one; the unmasked blocks one too far; a block's first page for all its columns; a KV head's heads in
    the wrong order; a scale left out; a reduce without rescaling; a row's end beyond its split; memory beyond the end
    read; a rotation the wrong way round; slot 0 taken for padding; padding that writes; a mean over the padded width;
    a group's scale with the wrong stride; the low group's minimum for the high one; a gate with the wrong sign; noise
    keyed by the block and not the token; noise that forgets the position; a Q8 row's scale of another row; a shard of
    the wrong rows; a bias left out; a draft taken for another token; the wrong one of the tokens drawn last, one of
    another request, and ids filled in that are not the step's.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COPIED = ("engine", "models", "telemetry", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """In ``file`` the only ``right`` becomes ``wrong``; ``test`` must see it."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


_ATTENTION = "tests/kernels/test_attention.py::"
_SIMPLE = "tests/kernels/test_elementwise.py::"
_GEMM = "tests/kernels/test_gemm.py::"
_SAMPLE = "tests/kernels/test_sample.py::"
_FEED = "tests/kernels/test_feed.py::"

MUTATIONS = (
    Mutation(
        "prefill mask off by one",
        "engine/kernels/paged_prefill.py",
        "(column[None, :] <= position[:, None])",
        "(column[None, :] < position[:, None])",
        _ATTENTION + "test_prefill_at_the_borders_of_pages_and_tiles",
    ),
    Mutation(
        "prefill takes the diagonal for a whole block",
        "engine/kernels/paged_prefill.py",
        "whole = (before + first // GROUP + 1) // BLOCK_N * BLOCK_N",
        "whole = (before + first // GROUP + BLOCK_N) // BLOCK_N * BLOCK_N",
        _ATTENTION + "test_prefill_at_the_borders_of_pages_and_tiles",
    ),
    Mutation(
        "prefill forgets the prefix",
        "engine/kernels/paged_prefill.py",
        "position = before + token",
        "position = token",
        _ATTENTION + "test_prefill_of_a_ragged_batch",
    ),
    Mutation(
        "decode takes a block's first page for all its columns",
        "engine/kernels/paged_decode.py",
        "page = tl.load(table + column // PAGE,",
        "page = tl.load(table + at // PAGE + 0 * column,",
        _ATTENTION + "test_decode_at_the_borders_of_pages_blocks_and_splits",
    ),
    Mutation(
        "decode mixes up the heads of KV heads",
        "engine/kernels/paged_decode.py",
        "head = kv_head * GROUP + row",
        "head = kv_head + row * (HEADS // GROUP)",
        _ATTENTION + "test_decode_of_uneven_rows",
    ),
    Mutation(
        "decode leaves the scale out",
        "engine/kernels/paged_decode.py",
        ".to(tl.float32) * scale",
        ".to(tl.float32) * 1.4426950408889634",
        _ATTENTION + "test_decode_of_uneven_rows",
    ),
    Mutation(
        "decode runs over the end of its split",
        "engine/kernels/paged_decode.py",
        "end = tl.minimum(begin + split, length)",
        "end = tl.minimum(begin + split + 1, length)",
        _ATTENTION + "test_decode_at_the_borders_of_pages_blocks_and_splits",
    ),
    Mutation(
        "decode reads values beyond the end",
        "engine/kernels/paged_decode.py",
        "value = tl.load(v_cache + kv_at, mask=there[:, None], other=0.0).to(PRODUCT)",
        "value = tl.load(v_cache + kv_at).to(PRODUCT)",
        _ATTENTION + "test_decode_at_the_borders_of_pages_blocks_and_splits",
    ),
    Mutation(
        "the reduce does not rescale what it has",
        "engine/kernels/paged_decode.py",
        "total = total * keep + add",
        "total = total + add",
        _ATTENTION + "test_decode_of_uneven_rows",
    ),
    Mutation(
        "the reduce takes splits that are empty",
        "engine/kernels/paged_decode.py",
        "for part in range(1, (length + split - 1) // split):",
        "for part in range(1, splits):",
        _ATTENTION + "test_decode_rows_have_the_same_bits_alone_and_among_others_split_or_not",
    ),
    Mutation(
        "a rotation the wrong way round",
        "engine/kernels/rope.py",
        "high = b * c + a * s",
        "high = b * c - a * s",
        _SIMPLE + "test_rope_rotates_and_writes_only_its_slots",
    ),
    Mutation(
        "slot 0 taken for padding",
        "engine/kernels/rope.py",
        "if slot >= 0:",
        "if slot > 0:",
        _SIMPLE + "test_rope_rotates_and_writes_only_its_slots",
    ),
    Mutation(
        "no bias on the values",
        "engine/kernels/rope.py",
        "value += tl.load(bias + v_from + v_within, mask=v_alive, other=0.0).to(tl.float32)",
        "value += 0.0",
        _SIMPLE + "test_rope_with_bias_and_head_norms",
    ),
    Mutation(
        "a mean over the padded width",
        "engine/kernels/norm.py",
        "mean = tl.sum(value * value, axis=0) / N",
        "mean = tl.sum(value * value, axis=0) / BLOCK",
        _SIMPLE + "test_rms_norm",
    ),
    Mutation(
        "a gate with the wrong sign",
        "engine/kernels/silu_mul.py",
        "tl.exp(-gate)",
        "tl.exp(gate)",
        _SIMPLE + "test_silu_mul",
    ),
    Mutation(
        "a scale with the wrong stride",
        "engine/kernels/gemm_quant.py",
        "tl.load(scales + at // GROUP * N + column, mask",
        "tl.load(scales + at // GROUP * BLOCK_N + column, mask",
        _GEMM + "test_gemm_quant_computes_with_the_unpacked_weights",
    ),
    Mutation(
        "the low group's minimum for the high one",
        "engine/kernels/gemm_quant.py",
        "m_high = tl.load(mins + first + N,",
        "m_high = tl.load(mins + first,",
        _GEMM + "test_gemm_quant_computes_with_the_unpacked_weights",
    ),
    Mutation(
        "columns of K beyond the end",
        "engine/kernels/gemm_small_m.py",
        "inside = (at + k < K)[None, :]",
        "inside = (at + k < K + 1)[None, :]",
        _GEMM + "test_gemm",
    ),
    Mutation(
        "an embedding row with its neighbour's scales",
        "engine/kernels/gemm_quant.py",
        "tl.load(scales + (k // GROUP).to(tl.int64) * N + row,",
        "tl.load(scales + (k // GROUP).to(tl.int64) * N + token,",
        _GEMM + "test_embed_gathers_rows",
    ),
    Mutation(
        "noise keyed by the block and not the token",
        "engine/kernels/sample.py",
        "_mix(base + (column + 1).to(tl.uint64)",
        "_mix(base + (column - at + 1).to(tl.uint64)",
        _SAMPLE + "test_the_tokens_are_those_of_the_cpu_path",
    ),
    Mutation(
        "noise that forgets the position",
        "engine/kernels/sample.py",
        "step = (tl.load(position + row) + 1)",
        "step = (tl.load(position + row) * 0 + 1)",
        _SAMPLE + "test_the_tokens_are_those_of_the_cpu_path",
    ),
    Mutation(
        "the wrong one of the tokens drawn last",
        "engine/kernels/feed.py",
        "drawn + (-1 - token)",
        "drawn + (0 - token)",
        _FEED + "test_open_ids_become_the_tokens_drawn_last_and_known_ones_stay",
    ),
    Mutation(
        "ids behind the last one are filled in",
        "engine/kernels/feed.py",
        "open_ = token < 0",
        "open_ = tl.load(ids + at) < 0",
        _FEED + "test_open_ids_become_the_tokens_drawn_last_and_known_ones_stay",
    ),
    Mutation(
        "a token fed to another request's row",
        "engine/runner_triton.py",
        "{one.request: row for row, one in enumerate(sampling)}",
        "{one.request: max(0, row - 1) for row, one in enumerate(sampling)}",
        _FEED + "test_the_tokens_are_those_of_steps_one_after_the_other",
    ),
    Mutation(
        "padding that writes to slot 0",
        "engine/device_batch.py",
        'at["slots"].fill(-1)',
        'at["slots"].fill(0)',
        "tests/kernels/test_device_batch.py::test_decodes_alone_are_padded_to_a_bucket",
    ),
    Mutation(
        "every rank has the first rank's heads",
        "engine/device_weights.py",
        "return whole[part.start * shape.head_dim : part.stop * shape.head_dim]",
        "return whole[: (part.stop - part.start) * shape.head_dim]",
        "tests/kernels/test_parallel.py::test_shards_are_parts_of_the_whole",
    ),
    Mutation(
        "a draft taken for another token",
        "engine/lookahead.py",
        "and request.tokens[ahead.position : piece.start + 1] == ahead.tokens[: at + 1]",
        "and True",
        "tests/kernels/test_lookahead.py::test_a_row_is_used_only_for_the_token_that_it_was_computed_with",
    ),
)


def caught(mutation: Mutation, tree: Path) -> bool:
    """Does the test fail with the fault in?  The tree is as it was afterwards."""
    path = tree / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.right) != 1:
        raise SystemExit(
            f"{mutation.name}: {mutation.right!r} is {text.count(mutation.right)} times in {mutation.file}"
        )
    path.write_text(text.replace(mutation.right, mutation.wrong), encoding="utf-8")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", mutation.test, "-x", "-q", "-p", "no:cacheprovider"],
            cwd=tree,
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(text, encoding="utf-8")
    # a kernel that reads memory which nobody owns may end the interpreter itself: that is seen as well
    if done.returncode not in (0, 1, -signal.SIGSEGV):
        raise SystemExit(f"{mutation.name}: the test did not run\n{done.stdout}{done.stderr}")
    return done.returncode != 0


def main(names: list[str]) -> int:
    """Replay all, or those named."""
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, tree / name)
        for mutation in chosen:
            seen = caught(mutation, tree)
            print(f"{'caught' if seen else 'MISSED'}  {mutation.name}", flush=True)
            if not seen:
                missed.append(mutation.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults were caught")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
