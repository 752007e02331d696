"""Every name that crosses a process or a file, with its unit and meaning.  Nothing else spells one.

The GenAI semantic conventions are still moving (status Development); the version that these names follow
stands beside them, so that a reader of an old bundle can tell.
"""

from __future__ import annotations

from typing import Final

SEMCONV_VERSION: Final = "1.38.0-development (gen_ai)"

# --- Phases of one request, in the order in which they happen.  They sum to the server's wall time. ---
INGRESS: Final = "ingress"  # request head read -> body parsed
TOKENIZE: Final = "tokenize"  # parsed -> prompt token ids known
QUEUE: Final = "queue"  # enqueued -> the first step that schedules it starts
PREFILL: Final = "prefill"  # -> first token sampled (waits between chunks inside it)
DECODE: Final = "decode"  # first token -> last token
PREEMPTED: Final = "preempted"  # evicted -> scheduled again
RECOMPUTE: Final = "recompute"  # scheduled again -> lost tokens restored
STALL: Final = "stall"  # runnable, but no step was running (taken out of prefill and decode)
SEND: Final = "send"  # last token -> last byte of the answer written
PHASES: Final = (INGRESS, TOKENIZE, QUEUE, PREFILL, DECODE, PREEMPTED, RECOMPUTE, STALL, SEND)

# The generator's share of a request: with the server's nine they sum to intended send -> end of the answer.
CLIENT_WAIT: Final = "client_wait"  # intended send -> first byte handed to the socket (lag and connect inside it)
NETWORK: Final = "network"  # client duration from the send - server duration
ROW_PHASES: Final = (CLIENT_WAIT, NETWORK, *PHASES)

# --- Wire between generator and engine ---
PHASES_HEADER: Final = "x-tailspan-phases"  # request header: "1" asks the engine for its phase account
PHASES_EVENT: Final = "tailspan.phases"  # SSE event name that carries it, just before [DONE]
PHASES_KEY: Final = "tailspan"  # JSON key that holds the account in the event and in plain answers
REPLICA_HEADER: Final = "x-tailspan-replica"  # response header: which replica answered
SIMULATED_HEADER: Final = "x-tailspan-simulated"  # response header: nothing was computed, times are of this model
SIMULATED_KEY: Final = "simulated"  # the same in the model list, in /health and in a bundle's manifest
REQUEST_ID_HEADER: Final = "x-request-id"
DEADLINE_HEADER: Final = "x-tailspan-deadline-ms"  # request header: ms after its head within which it is wanted

# --- Outcome labels (outcomes are judged per logical request) ---
GOOD: Final = "good"
LATE: Final = "late"
WRONG: Final = "wrong"
DROPPED: Final = "dropped"
INVALID: Final = "invalid"
LABELS: Final = (GOOD, LATE, WRONG, DROPPED, INVALID)

# Reasons of a drop; mandatory on every dropped request.
REFUSED: Final = "refused"
REJECTED: Final = "rejected"  # 429 / 503
TIMEOUT_CONNECT: Final = "timeout_connect"
TIMEOUT_FIRST_TOKEN: Final = "timeout_first_token"
TIMEOUT_TOTAL: Final = "timeout_total"
RESET: Final = "reset"
STREAM_CUT: Final = "stream_cut"
KV_OOM: Final = "kv_oom"
CONTEXT_OVERFLOW: Final = "context_overflow"
SERVER_ERROR: Final = "server_error"
HANG: Final = "hang"
DROP_REASONS: Final = (
    REFUSED, REJECTED, TIMEOUT_CONNECT, TIMEOUT_FIRST_TOKEN, TIMEOUT_TOTAL, RESET, STREAM_CUT, KV_OOM,
    CONTEXT_OVERFLOW, SERVER_ERROR, HANG,
)  # fmt: skip
# Reasons of a refusal by the engine, beside CONTEXT_OVERFLOW and KV_OOM.
REJECT_QUEUE: Final = "queue_full"  # 429
REJECT_TOKENS: Final = "queue_tokens"  # 429
REJECT_TTFT: Final = "predicted_ttft"  # 503
REJECT_LOADING: Final = "loading"  # 503
REJECT_DRAINING: Final = "draining"  # 503
REJECT_REASONS: Final = (
    REJECT_QUEUE, REJECT_TOKENS, REJECT_TTFT, REJECT_LOADING, REJECT_DRAINING, CONTEXT_OVERFLOW, KV_OOM,
)  # fmt: skip
SLOW_READER: Final = "slow_reader"  # error.type of a stream that was dropped because nobody read it
# Reasons of an invalid request: our own fault, never the server's.
SCHEDULE_LAG: Final = "schedule_lag"
BAD_REQUEST: Final = "bad_request"  # the server called our request malformed
WORKER_LOST: Final = "worker_lost"
CUT_BY_END: Final = "cut_by_end"
CLIENT_ERROR: Final = "client_error"  # the generator ran out of files, ports or memory
INVALID_REASONS: Final = (SCHEDULE_LAG, BAD_REQUEST, WORKER_LOST, CUT_BY_END, CLIENT_ERROR)

# --- Verdict on the run itself ---
VALID: Final = "VALID"
CLIENT_LIMITED: Final = "CLIENT_LIMITED"
INCOMPLETE: Final = "INCOMPLETE"

# --- Exit codes; where several hold, the first in EXIT_PRECEDENCE wins ---
EXIT_OK: Final = 0
EXIT_SLO_BROKEN: Final = 1
EXIT_REGRESSION: Final = 2
EXIT_RUN_NOT_VALID: Final = 3
EXIT_USAGE: Final = 4
EXIT_INTERNAL: Final = 5
EXIT_INTERRUPTED: Final = 130
EXIT_PRECEDENCE: Final = (EXIT_INTERNAL, EXIT_USAGE, EXIT_RUN_NOT_VALID, EXIT_SLO_BROKEN, EXIT_REGRESSION)

# --- Span names ---
ENGINE_SERVICE: Final = "tailspan-engine"  # service.name of the engine's spans
SERVER_SPAN: Final = "llm_request"
CLIENT_SPAN_PREFIX: Final = "chat"  # "chat {model}"
CLIENT_CHILDREN: Final = ("client_wait", "connect", "send", "wait_first_chunk", "stream")

# --- Span attributes ---
ATTR_OPERATION: Final = "gen_ai.operation.name"
ATTR_PROVIDER: Final = "gen_ai.provider.name"
ATTR_REQUEST_MODEL: Final = "gen_ai.request.model"
ATTR_RESPONSE_MODEL: Final = "gen_ai.response.model"
ATTR_RESPONSE_ID: Final = "gen_ai.response.id"
ATTR_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
ATTR_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
ATTR_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
ATTR_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
ATTR_TEMPERATURE: Final = "gen_ai.request.temperature"
ATTR_TOP_P: Final = "gen_ai.request.top_p"
ATTR_TOP_K: Final = "gen_ai.request.top_k"
ATTR_SEED: Final = "gen_ai.request.seed"
ATTR_SERVER_ADDRESS: Final = "server.address"
ATTR_SERVER_PORT: Final = "server.port"
ATTR_ERROR_TYPE: Final = "error.type"
ATTR_HTTP_STATUS: Final = "http.response.status_code"
# vLLM's names on the server span (seconds)
ATTR_LATENCY_QUEUE: Final = "gen_ai.latency.time_in_queue"
ATTR_LATENCY_TTFT: Final = "gen_ai.latency.time_to_first_token"
ATTR_LATENCY_E2E: Final = "gen_ai.latency.e2e"
ATTR_LATENCY_SCHEDULER: Final = "gen_ai.latency.time_in_scheduler"
ATTR_LATENCY_PREFILL: Final = "gen_ai.latency.time_in_model_prefill"
ATTR_LATENCY_DECODE: Final = "gen_ai.latency.time_in_model_decode"
ATTR_LATENCY_INFERENCE: Final = "gen_ai.latency.time_in_model_inference"
# our own
ATTR_RUN_ID: Final = "tailspan.run.id"
ATTR_TRACE_INDEX: Final = "tailspan.trace.index"
ATTR_INTENDED_TIME: Final = "tailspan.schedule.intended_time"  # s after clock zero
ATTR_SCHEDULE_LAG: Final = "tailspan.schedule.lag"  # s
ATTR_OUTCOME: Final = "tailspan.outcome"
ATTR_OUTCOME_REASON: Final = "tailspan.outcome.reason"
ATTR_QUEUE_DEPTH: Final = "tailspan.queue.depth_at_arrival"
ATTR_QUEUE_TOKENS: Final = "tailspan.queue.tokens_ahead"
ATTR_KV_AT_ADMIT: Final = "tailspan.kv.usage_at_admit"
ATTR_PREEMPTIONS: Final = "tailspan.kv.preemptions"
ATTR_CACHED_TOKENS: Final = "tailspan.prompt.cached_tokens"
ATTR_PREFILL_CHUNKS: Final = "tailspan.prefill.chunks"
ATTR_DRAFTS_ACCEPTED: Final = "tailspan.decode.drafts_accepted"  # tokens
ATTR_DECODE_MAX_GAP: Final = "tailspan.decode.max_gap"  # s
ATTR_BATCH_MEAN: Final = "tailspan.batch.size_mean"
ATTR_STEP_FIRST: Final = "tailspan.step.first"
ATTR_STEP_LAST: Final = "tailspan.step.last"
ATTR_FLOOR_TTFT: Final = "tailspan.floor.ttft"  # s, from the first step to the first token, alone on the device
ATTR_FLOOR_TPOT: Final = "tailspan.floor.tpot"  # s per token after the first, alone on the device
ATTR_PROMPT_SHA: Final = "tailspan.prompt_ids.sha"
ATTR_OUTPUT_SHA: Final = "tailspan.output_ids.sha"
ATTR_PHASE_PREFIX: Final = "tailspan.phase."  # + phase, ns, on the server span
ATTR_SAMPLING_PREFIX: Final = "tailspan.sampling.effective."
ATTR_PHASE_DURATION: Final = "tailspan.phase.duration_ns"  # on a phase's child span: its own time, stalls taken out
ATTR_PHASE_STALL: Final = "tailspan.phase.stall_ns"  # on a phase's child span: stalls inside it
EVENT_CHUNK: Final = "prefill.chunk"  # on prefill: a step computed a chunk of the prompt
EVENT_GAP: Final = "decode.gap"  # on decode: a silence far beyond the median
ATTR_EVENT_STEP: Final = "tailspan.step"
ATTR_EVENT_GAP: Final = "tailspan.gap_ns"
ATTR_SEMCONV: Final = "tailspan.semconv"  # on the resource: SEMCONV_VERSION
ATTR_SIMULATED: Final = "tailspan.simulated"  # on every span of an engine that computes nothing: what is simulated
ATTR_REPLICA: Final = "tailspan.replica"
ATTR_CONNECTION_REUSED: Final = "tailspan.connection.reused"

# --- Prometheus names of the engine; vLLM's where it has one, so that its dashboards work ---
M_RUNNING: Final = "vllm:num_requests_running"
M_WAITING: Final = "vllm:num_requests_waiting"
M_KV_USAGE: Final = "vllm:kv_cache_usage_perc"  # 0..1
M_PREFIX_QUERIES: Final = "vllm:prefix_cache_queries"  # tokens; exposed with _total
M_PREFIX_HITS: Final = "vllm:prefix_cache_hits"  # tokens
M_PREEMPTIONS: Final = "vllm:num_preemptions"
M_PROMPT_TOKENS: Final = "vllm:prompt_tokens"
M_GENERATION_TOKENS: Final = "vllm:generation_tokens"
M_SUCCESS: Final = "vllm:request_success"  # {finished_reason}
M_ITERATION_TOKENS: Final = "vllm:iteration_tokens_total"  # histogram, tokens per step
M_TTFT: Final = "vllm:time_to_first_token_seconds"
M_INTER_TOKEN: Final = "vllm:inter_token_latency_seconds"
M_TPOT: Final = "vllm:request_time_per_output_token_seconds"
M_E2E: Final = "vllm:e2e_request_latency_seconds"
M_QUEUE_TIME: Final = "vllm:request_queue_time_seconds"
M_PREFILL_TIME: Final = "vllm:request_prefill_time_seconds"
M_DECODE_TIME: Final = "vllm:request_decode_time_seconds"
M_INFERENCE_TIME: Final = "vllm:request_inference_time_seconds"
M_REJECTIONS: Final = "vllm:admission_rejections"  # {reason}
M_PHASE: Final = "tailspan_request_phase_seconds"  # {phase}
M_STEP: Final = "tailspan_engine_step_seconds"  # {kind}
M_STEP_GAP: Final = "tailspan_engine_step_gap_seconds"
M_LOOP_LAG: Final = "tailspan_event_loop_lag_seconds"
M_GC_PAUSE: Final = "tailspan_gc_pause_seconds"
M_KERNEL_COMPILE: Final = "tailspan_kernel_compile_seconds"  # {kernel}: spent since the start; about 0 from the cache
M_TOKEN_BUDGET: Final = "tailspan_token_budget"  # tokens of a step, now; less than configured after a lack of memory
M_BATCH_LIMIT: Final = "tailspan_batch_limit"  # requests that may run, now
M_MEMORY_SHORT: Final = "tailspan_device_memory_shortages"  # steps that the device had no memory for as a whole
M_VOID: Final = "tailspan_void_tokens"  # computed ahead for requests that turned out to be over
M_ALLOC_FAILURES: Final = "tailspan_kv_alloc_failures"  # pages were wanted and not there
M_STEP_MODEL_ERROR: Final = "tailspan_step_model_error_ratio"  # running mean of |predicted - measured| / measured
M_TTFT_ERROR: Final = "tailspan_predicted_ttft_error_seconds"  # |predicted - measured|, per request
M_BACKLOG: Final = "tailspan_backlog_seconds"  # predicted time until all that waits has its first token
M_ENGINE_REQUESTS: Final = "tailspan_engine_requests"  # {state}: received, finished, aborted, rejected, failed
M_ENGINE_LIVE: Final = "tailspan_engine_requests_live"
M_SERVER_RECEIVED: Final = "tailspan_server_requests_received"
M_SERVER_LIVE: Final = "tailspan_server_requests_live"
M_LAW_CHECKS: Final = "tailspan_law_checks"
M_LAW_VIOLATIONS: Final = "tailspan_law_violations"
M_SHADOWED: Final = "tailspan_shadow_requests"  # run again alone, and compared
M_DIVERGENCE: Final = "tailspan_divergence"  # answers that differ from themselves alone
M_STREAMS_DROPPED: Final = "tailspan_streams_dropped"  # {reason}
M_RECOMPUTED: Final = "tailspan_recomputed_tokens"
M_NONFINITE: Final = "tailspan_nonfinite_logits"
M_BUILD_INFO: Final = "tailspan_build_info"
M_DEVICE_INFO: Final = "tailspan_device_info"  # what the floors of steps and requests rest on
M_SERVER_REQUESTS: Final = "tailspan_server_requests"  # {outcome}: every request once; HTTP status or "abort"
M_SPANS_DROPPED: Final = "tailspan_spans_dropped"  # no collector took them
# generator (served by the Locust master)
M_OUTCOMES: Final = "tailspan_requests"  # {outcome,reason,class,replica}
M_SCHEDULE_LAG: Final = "tailspan_client_schedule_lag_seconds"
M_CLIENT_LOOP_LAG: Final = "tailspan_client_loop_lag_seconds"
M_CLIENT_CPU: Final = "tailspan_client_cpu_ratio"
M_CLIENT_INFLIGHT: Final = "tailspan_client_inflight"
M_CLIENT_DUE: Final = "tailspan_client_due_requests"
M_CLIENT_SENT: Final = "tailspan_client_sent_requests"
M_CLIENT_RETRIES: Final = "tailspan_client_retries"
M_CLIENT_LAG_BOUND: Final = "tailspan_client_lag_bound_seconds"  # beyond it the run is CLIENT_LIMITED
M_RUN_INFO: Final = "tailspan_run_info"  # {run,slo,trace}
# a watch beside production
M_WATCH_BREACH: Final = "tailspan_watch_breach"
M_WATCH_BREACHES: Final = "tailspan_watch_breaches"
M_WATCH_REQUESTS: Final = "tailspan_watch_look_requests"
M_WATCH_LABELS: Final = "tailspan_watch_look_outcomes"  # {outcome}
M_WATCH_HOLDS: Final = "tailspan_watch_objective_holds"  # {objective}: 1, 0, NaN
M_WATCH_VALUE: Final = "tailspan_watch_objective_value"  # {objective}: seconds, or a share
M_WATCH_SILENCE: Final = "tailspan_watch_silence_seconds"
M_WATCH_DISK: Final = "tailspan_watch_disk_bytes"
M_WATCH_WINDOWS: Final = "tailspan_watch_windows"
M_WATCH_CANARIES: Final = "tailspan_watch_canaries"  # {result}

#: 50 us .. 120 s, eight buckets a decade (vLLM's start at 10 ms, so its p99 of anything faster is an artefact).
SECONDS_BUCKETS: Final = (
    *(round(5e-5 * 10 ** (k / 8), 9) for k in range(52) if 5e-5 * 10 ** (k / 8) < 120),
    120.0,
)
