"""The five Grafana dashboards: live, phases, engine, generator, and one for a vLLM that is not ours."""

from __future__ import annotations

from typing import Any, Final

from grafana_foundation_sdk.builders import dashboard

from dashboards.grafana.panels import ENGINE, board, heat, line, mean, number, quantile, quantiles, rows
from telemetry import names
from telemetry.validity import CPU_MAX

OK, WARN, BAD = "#3A97D4", "#EBB400", "#D55E00"
OUTCOMES: Final = f"{names.M_OUTCOMES}_total"
#: Keeps what belongs to the chosen runs: the generator serves the name of its run beside its figures.
OF_RUN: Final = f' * on (job, instance) group_left (run) {names.M_RUN_INFO}{{run=~"$run"}}'
PHASE_NOTE: Final = "Means add up to the mean end-to-end time; quantiles of phases do not."
BUCKETS: Final = "Read from buckets of 33 % width (eight a decade, from 50 us): that is how exact it is."


def _rate(selector: str, by: str) -> str:
    return f"sum by ({by}) (rate({OUTCOMES}{selector}[$__rate_interval]){OF_RUN})"


def _increase(selector: str) -> str:
    return f"sum(increase({OUTCOMES}{selector}[$__range]){OF_RUN})"


def _is(sign: str, label: str) -> str:
    return f'{{outcome{sign}"{label}"}}'


def live() -> Any:
    """What became of the requests, by outcome, reason, class and replica."""
    made = board("tailspan-live", "tailspan: live", "A load test while it goes: every request has one label.", ("run",))
    good, judged = _increase(_is("=", names.GOOD)), _increase(_is("!=", names.INVALID))
    share = f"({good} or vector(0)) / ({judged} > 0)"
    made = made.with_row(dashboard.Row("In the time range"))
    made = made.with_panel(
        number("Good", "Share of the judged requests that were right and in time.", "percentunit", share,
               ((None, BAD), (0.9, WARN), (0.99, OK)))
    )  # fmt: skip
    for label, what in (
        (names.LATE, "Right answer after its deadline."),
        (names.WRONG, "In time, but the answer is bad."),
        (names.DROPPED, "No answer."),
        (names.INVALID, "Our own fault; says nothing about the server."),
    ):
        expr = f"{_increase(_is('=', label))} or vector(0)"
        made = made.with_panel(number(label.capitalize(), f"{what} Requests.", "none", expr, ((None, OK), (1, BAD))))
    limited = f"max({names.M_SCHEDULE_LAG} / {names.M_CLIENT_LAG_BOUND})"
    text = "Lag p99 over its bound: from 1 on the run is CLIENT_LIMITED, and its latencies are partly the client's own."
    made = made.with_panel(number("Client", text, "percentunit", limited, ((None, OK), (0.7, WARN), (1, BAD))))
    made = made.with_row(dashboard.Row("Requests a second"))
    for title, by, selector in (
        ("By outcome", "outcome", ""),
        ("Not good, by reason", "outcome, reason", _is("!=", names.GOOD)),
        ("Not good, by class", "outcome, class", _is("!=", names.GOOD)),
        ("Not good, by replica", "outcome, replica", _is("!=", names.GOOD)),
    ):
        legend = " ".join(f"{{{{{part}}}}}" for part in by.split(", "))
        made = made.with_panel(
            line(
                title, "Judged as they end, by the SLO of the run.", "reqps", (_rate(selector, by), legend), stack=True
            )
        )
    budget = "Share of bad requests over 5 min, 1 h and 6 h (recorded by the SLO's rules); alerts need two windows."
    burn = [(f"slo:bad:ratio_rate{over}", f"{over} {{{{objective}}}}") for over in ("5m", "1h", "6h")]
    made = made.with_panel(line("Bad requests by objective", budget, "percentunit", *burn))
    by_class = [(f"class:bad:ratio_rate{over}", f"{over} {{{{class}}}} {{{{objective}}}}") for over in ("5m", "1h")]
    made = made.with_panel(line("Bad requests by class and objective", budget, "percentunit", *by_class))
    table = f"sum by (outcome, reason, class, replica) (increase({OUTCOMES}[$__range]){OF_RUN}) > 0"
    return made.with_panel(
        rows("Requests in the time range", "One row for each outcome, reason, class and replica.", table)
    )


def phases() -> Any:
    """Where the time goes, as the engine accounts for it."""
    made = board("tailspan-phases", "tailspan: phases", "Where the time of a request goes, as the engine says.",
                 ("model", "engine"))  # fmt: skip
    made = made.with_row(dashboard.Row("Means: these add up"))
    made = made.with_panel(
        line("Mean time in each phase", f"From sum and count. {PHASE_NOTE}", "s",
             (mean(names.M_PHASE, ENGINE, "phase"), "mean {{phase}}"), stack=True)
    )  # fmt: skip
    share = (
        f"sum by (phase) (rate({names.M_PHASE}_sum{ENGINE}[$__rate_interval])) / ignoring (phase) group_left () "
        f"(sum(rate({names.M_PHASE}_sum{ENGINE}[$__rate_interval])) > 0)"
    )
    made = made.with_panel(
        line("Share of each phase", "Of the time of all requests that ended.", "percentunit", (share, "{{phase}}"),
             stack=True)
    )  # fmt: skip
    made = made.with_row(dashboard.Row("Quantiles: these do not add up"))
    for name, title in ((names.M_E2E, "End to end"), (names.M_TTFT, "Time to first token"),
                        (names.M_TPOT, "Time per output token"), (names.M_INTER_TOKEN, "Between tokens")):  # fmt: skip
        text = f"In the server, from the request's head on. {BUCKETS}"
        made = made.with_panel(line(title, text, "s", *quantiles(name, ENGINE), (mean(name, ENGINE, "job"), "mean")))
    p99 = quantile(0.99, names.M_PHASE, ENGINE, "phase")
    made = made.with_panel(line("p99 of each phase", f"{PHASE_NOTE} {BUCKETS}", "s", (p99, "p99 {{phase}}"), width=24))
    made = made.with_row(dashboard.Row("Heatmaps: a point opens its trace"))
    made = made.with_panel(heat("End to end", "Requests by the time they took.", names.M_E2E, ENGINE))
    return made.with_panel(heat("Time to first token", "Requests by their first token.", names.M_TTFT, ENGINE))


def engine() -> Any:
    """Steps, memory, admission and what the engine finds wrong with itself."""
    made = board("tailspan-engine", "tailspan: engine", "The bundled engine from inside.", ("model", "engine"))
    rate = "$__rate_interval"
    made = made.with_row(dashboard.Row("Load"))
    made = made.with_panel(
        line("Requests in the engine", "Now.", "none", (f"{names.M_RUNNING}{ENGINE}", "running {{engine}}"),
             (f"{names.M_WAITING}{ENGINE}", "waiting {{engine}}"))
    )  # fmt: skip
    made = made.with_panel(
        line("Tokens a second", "Prompt tokens computed, and tokens generated.", "none",
             (f"sum by (engine) (rate({names.M_PROMPT_TOKENS}_total{ENGINE}[{rate}]))", "prompt {{engine}}"),
             (f"sum by (engine) (rate({names.M_GENERATION_TOKENS}_total{ENGINE}[{rate}]))", "generated {{engine}}"))
    )  # fmt: skip
    made = made.with_panel(
        line("KV memory", "Share of the pool in use; share of looked-up prompt tokens that were cached.", "percentunit",
             (f"{names.M_KV_USAGE}{ENGINE}", "in use {{engine}}"),
             (f"sum by (engine) (rate({names.M_PREFIX_HITS}_total{ENGINE}[{rate}])) / "
              f"(sum by (engine) (rate({names.M_PREFIX_QUERIES}_total{ENGINE}[{rate}])) > 0)", "cached {{engine}}"))
    )  # fmt: skip
    made = made.with_panel(
        line("Backlog", "Predicted time until all that waits has its first token.", "s",
             (f"{names.M_BACKLOG}{ENGINE}", "{{engine}}"))
    )  # fmt: skip
    made = made.with_row(dashboard.Row("Steps"))
    steps = (quantile(q, names.M_STEP, ENGINE, "kind") for q in (0.5, 0.99))
    made = made.with_panel(
        line("Step time by kind", BUCKETS, "s", *zip(steps, ("p50 {{kind}}", "p99 {{kind}}"), strict=True))
    )
    gap = f"sum by (engine) (rate({names.M_STEP_GAP}_sum{ENGINE}[{rate}]))"
    made = made.with_panel(
        line(
            "Work was there and no step ran",
            "Share of the time; the stall detector.",
            "percentunit",
            (gap, "{{engine}}"),
        )
    )
    made = made.with_panel(
        line("Tokens in a step", "Mean batch of tokens, from sum and count.", "none",
             (mean(names.M_ITERATION_TOKENS, ENGINE, "engine"), "mean {{engine}}"))
    )  # fmt: skip
    pauses = ((quantile(0.99, names.M_LOOP_LAG, ENGINE), "event loop lag p99"),
              (quantile(0.99, names.M_GC_PAUSE, ENGINE), "garbage collection p99"))  # fmt: skip
    made = made.with_panel(line("Pauses", f"Of the server's own process. {BUCKETS}", "s", *pauses))
    made = made.with_row(dashboard.Row("Refused and lost"))
    refused = ((f"sum by (reason) (rate({names.M_REJECTIONS}_total{ENGINE}[{rate}]))", "refused: {{reason}}"),
               (f"sum by (engine) (rate({names.M_PREEMPTIONS}_total{ENGINE}[{rate}]))",
                "preempted {{engine}}"))  # fmt: skip
    made = made.with_panel(line("Refused and preempted", "Requests a second.", "reqps", *refused))
    ends = f"sum by (outcome) (rate({names.M_SERVER_REQUESTS}_total{ENGINE}[{rate}]))"
    made = made.with_panel(
        line("Every request by its end", "HTTP status, or abort.", "reqps", (ends, "{{outcome}}"), stack=True)
    )
    made = made.with_row(dashboard.Row("What is wrong"))
    for title, name, text in (
        ("Broken laws", names.M_LAW_VIOLATIONS, "Conservation laws that a check found broken: none may be."),
        ("Not finite", names.M_NONFINITE, "Rows whose logits were not finite: each is a dropped request."),
        ("Diverged", names.M_DIVERGENCE, "Answers that differ from themselves alone (only with --shadow)."),
        ("Pages not there", names.M_ALLOC_FAILURES, "KV pages that were wanted and not there."),
        ("Recomputed", names.M_RECOMPUTED, "Tokens computed again after a preemption."),
        ("Spans lost", names.M_SPANS_DROPPED, "Spans that nobody took; between runs nobody listens."),
    ):
        expr = f"sum(increase({name}_total{ENGINE}[$__range]))"
        colour = OK if name in (names.M_SPANS_DROPPED, names.M_RECOMPUTED, names.M_ALLOC_FAILURES) else BAD
        made = made.with_panel(number(title, text, "none", expr, ((None, OK), (1, colour))))
    info = f'{names.M_BUILD_INFO}{{engine=~"$engine"}}'
    return made.with_panel(rows("What runs here", "Version, digests and precision.", info, hidden=("Value",)))


def generator() -> Any:
    """Is the client sound?"""
    made = board("tailspan-generator", "tailspan: generator", "Is the load generator sound?  Else nothing else counts.",
                 ("run",))  # fmt: skip
    made = made.with_panel(
        line("Due and sent", "Requests a second; where they part, the generator does not keep up.", "reqps",
             (f"rate({names.M_CLIENT_DUE}_total[$__rate_interval]){OF_RUN}", "due {{run}}"),
             (f"rate({names.M_CLIENT_SENT}_total[$__rate_interval]){OF_RUN}", "sent {{run}}"))
    )  # fmt: skip
    made = made.with_panel(
        line(
            "In flight", "Requests without their last byte.", "none", (f"{names.M_CLIENT_INFLIGHT}{OF_RUN}", "{{run}}")
        )
    )
    lag = ((f"{names.M_SCHEDULE_LAG}{OF_RUN}", "schedule lag p99"),
           (f"{names.M_CLIENT_LOOP_LAG}{OF_RUN}", "loop lag p99"),
           (f"{names.M_CLIENT_LAG_BOUND}{OF_RUN}", "bound"))  # fmt: skip
    text = "Of the worst worker, over the run so far.  Above the bound the run is CLIENT_LIMITED."
    made = made.with_panel(line("Lateness of the generator", text, "s", *lag))
    cpu = f"A sender that uses {CPU_MAX:.0%} of a core makes the run CLIENT_LIMITED."
    made = made.with_panel(
        line("CPU of the busiest sender", cpu, "percentunit", (f"{names.M_CLIENT_CPU}{OF_RUN}", "{{run}}"))
    )
    retries = f"rate({names.M_CLIENT_RETRIES}_total[$__rate_interval]){OF_RUN}"
    made = made.with_panel(line("Retries", "Attempts beyond the first, a second.", "reqps", (retries, "{{run}}")))
    runs = f'max by (run, slo, trace) (last_over_time({names.M_RUN_INFO}{{run=~"$run"}}[$__range]))'
    return made.with_panel(
        rows("Runs in the time range", "Their bundles have these ids.", runs, width=12, hidden=("Value",))
    )


def vllm() -> Any:
    """Only what a plain vLLM serves: no name of ours."""
    made = board("tailspan-vllm", "tailspan: any vLLM", "A vLLM that is not ours: only vLLM's own metrics.",
                 ("model", "engine"))  # fmt: skip
    rate = "$__rate_interval"
    coarse = (
        "vLLM's buckets are coarse: below 0.3 s (queue, prefill, decode) or 10 ms (tokens) a quantile is an artefact."
    )
    made = made.with_panel(
        line("Requests in the engine", "Now.", "none", (f"{names.M_RUNNING}{ENGINE}", "running {{engine}}"),
             (f"{names.M_WAITING}{ENGINE}", "waiting {{engine}}"))
    )  # fmt: skip
    made = made.with_panel(
        line("Tokens a second", "Prompt tokens, and tokens generated.", "none",
             (f"sum by (engine) (rate({names.M_PROMPT_TOKENS}_total{ENGINE}[{rate}]))", "prompt {{engine}}"),
             (f"sum by (engine) (rate({names.M_GENERATION_TOKENS}_total{ENGINE}[{rate}]))", "generated {{engine}}"))
    )  # fmt: skip
    words = {names.M_QUEUE_TIME: "queue", names.M_PREFILL_TIME: "prefill", names.M_DECODE_TIME: "decode and preemption"}
    means = [(mean(name, ENGINE, "job"), f"mean {word}") for name, word in words.items()]
    made = made.with_panel(
        line(
            "Mean time in each phase",
            f"From sum and count: exact whatever the buckets. {PHASE_NOTE}",
            "s",
            *means,
            stack=True,
        )
    )
    for name, title in ((names.M_TTFT, "Time to first token"), (names.M_INTER_TOKEN, "Between tokens"),
                        (names.M_E2E, "End to end")):  # fmt: skip
        made = made.with_panel(line(title, coarse, "s", *quantiles(name, ENGINE), (mean(name, ENGINE, "job"), "mean")))
    made = made.with_panel(
        line("KV memory", "Share in use, and of the looked-up prompt tokens that were cached.", "percentunit",
             (f"{names.M_KV_USAGE}{ENGINE}", "in use {{engine}}"),
             (f"sum by (engine) (rate({names.M_PREFIX_HITS}_total{ENGINE}[{rate}])) / "
              f"(sum by (engine) (rate({names.M_PREFIX_QUERIES}_total{ENGINE}[{rate}])) > 0)", "cached {{engine}}"))
    )  # fmt: skip
    made = made.with_panel(
        line("Finished and preempted", "Requests a second; vLLM does not count what it refused.", "reqps",
             (f"sum by (finished_reason) (rate({names.M_SUCCESS}_total{ENGINE}[{rate}]))", "{{finished_reason}}"),
             (f"sum by (engine) (rate({names.M_PREEMPTIONS}_total{ENGINE}[{rate}]))", "preempted {{engine}}"))
    )  # fmt: skip
    return made.with_panel(heat("End to end", "Requests by the time they took.", names.M_E2E, ENGINE))


BOARDS: Final = (live, phases, engine, generator, vllm)
