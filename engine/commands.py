"""``tailspan serve``: one engine behind an OpenAI-compatible HTTP server, until a signal ends it.

Owns the options and what they mean.  Nothing heavy is imported before an option was found good.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from engine.server.logs import set_up
from models.addresses import checked_host
from models.errors import UserError
from telemetry.forward import checked_collector


def serve_command(
    model: Annotated[
        str,
        typer.Option(
            help="A known name, a GGUF file or a safetensors folder; simulated also: llama-3.1-8b and others."
        ),
    ] = "smollm2",
    backend: Annotated[
        str,
        typer.Option(
            help="auto (triton where there is a GPU, else cpu), cpu, triton, or simulated: steps take a modelled time, "
            "nothing is computed."
        ),
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="What a simulated model runs on: a100, h100, h200, l4, cpu (this machine).")
    ] = None,
    sim_fit: Annotated[
        Path | None,
        typer.Option(help="Step times fitted to a real engine (python -m engine.step_fit) [the account's]."),
    ] = None,
    sim_seed: Annotated[int, typer.Option(help="Of simulated tokens and noise.", min=0)] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on; only this machine by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes any free one.", min=0, max=65535)] = 8000,
    replica: Annotated[str | None, typer.Option(help="Name of this server in answers and spans [host:port].")] = None,
    max_batch: Annotated[int, typer.Option(help="Most requests that run at once.")] = 16,
    token_budget: Annotated[int, typer.Option(help="Most tokens computed in one step.")] = 128,
    kv_blocks: Annotated[int | None, typer.Option(help="Pages of 16 tokens in the KV pool [from free memory].")] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Most tokens of a request, prompt and output [the model's].")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the forward [one per core].")] = None,
    nice: Annotated[int, typer.Option(help="Lower this process's priority by so much (0..19).")] = 0,
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            "--dtype",
            help="auto (int4 if that loses nothing, else bf16), fp32, bf16, int8, int4, int4-bf16; "
            "simulated: auto (bf16), fp32, fp16, bf16, fp8, int8, int4, q8_0, q4_0, q4_1.",
        ),
    ] = "auto",
    queue_limit: Annotated[int, typer.Option(help="Most requests that wait; one more gets a 429.")] = 1024,
    queue_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens that wait; more get a 429 [no limit].")
    ] = None,
    max_predicted_ttft: Annotated[
        float | None, typer.Option(help="Seconds; a request whose first token would take longer gets a 503 [no limit].")
    ] = None,
    policy: Annotated[str, typer.Option(help="Who is served first: fcfs, priority or deadline.")] = "fcfs",
    check_every: Annotated[int, typer.Option(help="Check the laws every so many steps; 0: only when idle.")] = 1000,
    shadow: Annotated[float, typer.Option(help="Share of the answers that is run again alone and compared.")] = 0.0,
    varying: Annotated[
        bool, typer.Option("--varying", help="triton: faster tiles and splits; a row's last bits depend on its mates.")
    ] = False,
    kv_dtype: Annotated[str, typer.Option(help="triton: auto (as activations) or fp8, half of 16 bits.")] = "auto",
    speculate: Annotated[
        int, typer.Option(help="triton: most drafts a step for a greedy request, from its own text; 0: none.")
    ] = 0,
    tensor_parallel: Annotated[int, typer.Option(help="triton: GPUs that share the model.")] = 1,
    no_cuda_graphs: Annotated[bool, typer.Option("--no-cuda-graphs", help="triton: start every kernel anew.")] = False,
    no_overlap: Annotated[
        bool, typer.Option("--no-overlap", help="triton: schedule a step only when the one before it was read.")
    ] = False,
    otlp_endpoint: Annotated[
        str, typer.Option(help="OTLP/HTTP collector for spans.", envvar="OTEL_EXPORTER_OTLP_ENDPOINT")
    ] = "http://127.0.0.1:4318",
    no_spans: Annotated[bool, typer.Option("--no-spans", help="Make no spans.")] = False,
    body_limit: Annotated[int, typer.Option(help="Most bytes of a request body; above it: 413.", min=1024)] = 4
    * 1024
    * 1024,
    stream_buffer: Annotated[
        int, typer.Option(help="Most bytes that wait for a slow reader; above it its stream is dropped.", min=1024)
    ] = 1024 * 1024,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that requests in flight may take after a stop.", min=0.0)
    ] = 10.0,
    api_key_env: Annotated[
        str | None, typer.Option(help="Variable with the key that clients must send [anyone may ask].")
    ] = None,
    ready_file: Annotated[Path | None, typer.Option(help='Written once ready: {"url": ..., "pid": ...}.')] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    enable_faults: Annotated[
        bool, typer.Option("--enable-faults", help="Let /debug/faults break this server; this machine only.")
    ] = False,
) -> None:
    """Serve a model over OpenAI's HTTP API, with the phases of every request."""
    set_up(log_level, log_format)
    checked_host(host, "--host")
    if not no_spans:
        checked_collector(otlp_endpoint, "--otlp-endpoint")
    from engine.server.api_key import key_from_environment

    api_key = key_from_environment(api_key_env) if api_key_env is not None else None
    lower_priority(nice)
    # After each of torch's operations (sampling, or the whole forward where there is no compiler) OpenMP's threads spin
    # for milliseconds by default, on cores that others want as well.  Read once, when torch loads the library.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from engine.config import EngineConfig
    from engine.server.lifecycle import ServeOptions, serve
    from engine.server.service import Limits

    config = EngineConfig(
        model=model,
        max_batch=max_batch,
        token_budget=token_budget,
        kv_blocks=kv_blocks,
        max_context=max_context,
        threads=threads,
        dtype=weights,
        queue_limit=queue_limit,
        queue_tokens=queue_tokens,
        max_predicted_ttft=max_predicted_ttft,
        policy=policy,
        check_every=check_every,
        shadow=shadow,
        backend=backend,
        invariant=not varying,
        kv_dtype=kv_dtype,
        speculate=speculate,
        tensor_parallel=tensor_parallel,
        cuda_graphs=not no_cuda_graphs,
        overlap=not no_overlap,
        device=device,
        sim_fit=None if sim_fit is None else str(sim_fit),
        sim_seed=sim_seed,
    )
    options = ServeOptions(
        config,
        host=host,
        port=port,
        replica=replica,
        otlp_endpoint=None if no_spans else otlp_endpoint,
        limits=Limits(body=body_limit, drain_s=drain_timeout, stream=stream_buffer),
        ready_file=ready_file,
        api_key=api_key,
        enable_faults=enable_faults,
    )
    code = serve(options, lambda line: print(line, flush=True))
    if code:
        raise typer.Exit(code)


def lower_priority(by: int) -> None:
    """Give way to other processes.  Raises UserError for what would raise the priority instead."""
    if not 0 <= by <= 19:
        raise UserError(f"{by} is outside 0..19", where="--nice", remedy="the server can only lower its own priority")
    if by:
        os.nice(by)
        if os.getsid(0) == os.getpid():
            # Linux shares the processor between sessions first (autogroup), and nice counts only within one
            with suppress(OSError):
                Path("/proc/self/autogroup").write_text(f"{by}\n", encoding="ascii")
