"""The tables of a run bundle: column, type, unit.  The contract between generator, engine and every reader.

Offsets (``*_s`` of moments) are seconds after the run's one monotonic zero, on the generator's clock; durations
(``phase_*``, ``server_duration_s``) are seconds on the clock of the process that measured them.  Monotonic stamps of
two processes are never subtracted: only durations cross.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from telemetry.names import PHASES

SCHEMA_VERSION: Final = 1

#: One row per logical request: facts only, never a verdict.
REQUESTS: Final = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),  # position in the schedule, 0-based
        ("trace_row", pa.int64()),  # row of the trace file it comes from (0-based data row)
        ("class", pa.string()),
        ("worker", pa.int32()),
        ("target", pa.string()),  # base URL asked
        ("replica", pa.string()),  # replica header, else the peer address
        ("model", pa.string()),  # model name the server reported
        ("model_asked", pa.string()),  # the name that was sent
        ("fingerprint", pa.string()),  # OpenAI's system_fingerprint: what answered, weights and settings
        # schedule
        pa.field("intended_s", pa.float64(), nullable=False),
        ("sent_s", pa.float64()),  # first byte of the request handed to the socket; null: never sent
        ("lag_s", pa.float64()),  # start of work on the request - intended
        ("connect_s", pa.float64()),  # duration of connecting; 0 when the connection was reused
        ("connection_reused", pa.bool_()),  # it was open before: used by another request, or opened ahead
        # moments of the answer (null: did not happen)
        ("headers_s", pa.float64()),
        ("first_chunk_s", pa.float64()),  # first SSE data event of any kind
        ("first_token_s", pa.float64()),  # first visible or reasoning token; not the role chunk
        ("first_content_s", pa.float64()),  # first non-reasoning token
        ("last_token_s", pa.float64()),
        ("end_s", pa.float64()),  # answer complete, failed or given up
        ("chunk_s", pa.list_(pa.float32())),  # token-bearing chunks, seconds after intended_s
        ("chunk_tokens", pa.list_(pa.int16())),  # tokens in each of them
        ("max_gap_s", pa.float64()),  # longest silence between token chunks; null below two chunks
        ("tpot_s", pa.float64()),  # (last - first token) / (n - tokens in first chunk); null when undefined
        # what came back
        ("status", pa.int32()),  # HTTP status; null: none came
        ("error", pa.string()),  # reason code of telemetry.names; null: complete answer
        ("error_detail", pa.string()),
        ("retry_after_s", pa.float64()),
        ("finish_reason", pa.string()),
        ("truncated_by_limit", pa.bool_()),  # finish reason "length": cut by max_tokens, not wrong by itself
        ("done_marker", pa.bool_()),  # [DONE] seen
        ("attempts", pa.int32()),  # sends of it, retries included; its moments are those of the last one
        # tokens
        ("input_tokens", pa.int32()),  # prompt tokens planned, template included
        ("expected_output_tokens", pa.int32()),
        ("prompt_tokens_expected", pa.int32()),  # our count with the reference tokenizer and template
        ("prompt_tokens_reported", pa.int32()),  # usage.prompt_tokens
        ("completion_tokens_reported", pa.int32()),
        ("completion_tokens_counted", pa.int32()),  # re-tokenised by us
        ("cached_tokens", pa.int32()),
        ("usage_estimated", pa.bool_()),  # no usage came; counted by us
        ("chunks", pa.int32()),  # token-bearing chunks, of most servers one a token; null: not streamed, or some hidden
        # quality facts on the text (the text itself is kept by choice)
        ("output_sha", pa.string()),
        ("output_chars", pa.int32()),
        ("replacement_chars", pa.int32()),  # U+FFFD
        ("special_leaks", pa.int32()),  # special tokens of the model spelled in the text
        ("repeat_share", pa.float32()),  # largest share of the text covered by one repeated n-gram
        ("dominance", pa.float32()),  # share of the commonest token; null below 16 of them
        ("foreign_letters", pa.int32()),  # letters of scripts that the prompt does not have; null: any is right
        ("input_script", pa.string()),  # of most letters of the prompt, and of the answer
        ("output_script", pa.string()),
        ("input_sketch", pa.list_(pa.int32())),  # the prompt's bytes, and the answer's token ids, counted in 16 bins
        ("output_sketch", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("canary_kind", pa.string()),  # golden, sampling; null: a request of the load
        ("canary_id", pa.string()),  # of the golden that was asked
        ("canary_place", pa.string()),  # miss, hit, plain or hot: see loadgen.canaries.mixed
        ("logprobs", pa.string()),  # JSON, OpenAI's entries of each token, where they were asked for
        ("expected_answer", pa.string()),  # what a right answer contains; null: not known
        ("answer_matches", pa.bool_()),  # the text contains it; null: not known, or no text came
        # the server's own account (null where the server gives none)
        ("server_request_id", pa.string()),
        ("server_duration_s", pa.float64()),
        *[(f"phase_{name}_s", pa.float64()) for name in PHASES],
        ("prefill_wait_s", pa.float64()),  # inside prefill: between its chunks
        ("prefill_chunks", pa.int32()),
        ("preemptions", pa.int32()),
        ("queue_depth_at_arrival", pa.int32()),
        ("queue_tokens_ahead", pa.int32()),
        ("decode_max_gap_s", pa.float64()),
        ("batch_size_mean", pa.float64()),
        ("step_first", pa.int64()),
        ("step_last", pa.int64()),
        ("floor_ttft_s", pa.float64()),  # least time from its first step to its first token, alone on the device
        ("floor_tpot_s", pa.float64()),  # least mean time per token after the first, alone; null below two tokens
        # joining
        ("trace_id", pa.string()),
        ("span_id", pa.string()),
        ("sampled", pa.bool_()),
    ]
)

#: One row per attempt at a logical request, where users retry (a plan with patience).
ATTEMPTS: Final = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),  # of the logical request
        pa.field("attempt", pa.int32(), nullable=False),  # 0: the first
        ("worker", pa.int32()),
        ("target", pa.string()),
        ("replica", pa.string()),
        ("due_s", pa.float64()),  # the intended send, or the end of the pause before a retry
        ("pause_s", pa.float64()),  # before this retry; null: the first attempt
        ("sent_s", pa.float64()),  # null: never sent
        ("first_token_s", pa.float64()),
        ("end_s", pa.float64()),
        ("status", pa.int32()),
        ("error", pa.string()),  # reason code; null: complete answer
        ("error_detail", pa.string()),
        ("retry_after_s", pa.float64()),
        ("verdict", pa.string()),  # "answered", "retried", "gave_up", "no_budget", "not_retried", "cut"
    ]
)

#: One row per span, as received over OTLP.
SPANS: Final = pa.schema(
    [
        ("trace_id", pa.string()),
        ("span_id", pa.string()),
        ("parent_span_id", pa.string()),
        ("name", pa.string()),
        ("kind", pa.string()),  # INTERNAL, SERVER, CLIENT, ...
        ("service", pa.string()),
        ("start_unix_ns", pa.int64()),
        ("end_unix_ns", pa.int64()),
        ("status", pa.string()),  # UNSET, OK, ERROR
        ("attributes", pa.string()),  # JSON object
        ("events", pa.string()),  # JSON list of {name, unix_ns, attributes}
    ]
)

#: One row per engine step.  Stamps are ns on the engine's monotonic clock.
STEPS: Final = pa.schema(
    [
        ("replica", pa.string()),
        ("step", pa.int64()),
        ("start_ns", pa.int64()),
        ("end_ns", pa.int64()),
        ("gap_ns", pa.int64()),  # runnable work waited and no step ran, before this one
        ("kind", pa.string()),  # decode, prefill, mixed
        ("running", pa.int32()),  # requests holding KV after scheduling
        ("waiting", pa.int32()),
        ("decode_seqs", pa.int32()),
        ("decode_tokens", pa.int32()),
        ("prefill_seqs", pa.int32()),
        ("prefill_tokens", pa.int32()),
        ("recomputed_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("context_tokens", pa.int64()),  # tokens that hold KV after the step, summed over its sequences
        ("sampled_rows", pa.int32()),  # rows whose logits are wanted
        ("attended", pa.int64()),  # pairs of a query and a token that it sees
        ("kv_used", pa.int32()),  # blocks
        ("kv_free", pa.int32()),
        ("preempted", pa.int32()),
        ("preempted_requests", pa.list_(pa.string())),  # that lost their pages at its start
        ("admitted", pa.list_(pa.string())),  # that came (back) from the queue at its start
        ("admitted_cached", pa.list_(pa.int32())),  # tokens of each that the prefix cache had
        ("requests", pa.list_(pa.string())),  # server request ids in the batch
        ("request_tokens", pa.list_(pa.int32())),  # tokens of each in this step
        # the account of models.roofline; null where the engine does not know its device
        ("bytes", pa.int64()),  # least bytes moved
        ("flops", pa.int64()),
        ("floor_ns", pa.int64()),  # least duration: max(bytes / bandwidth, FLOPs / peak) + fixed cost
        ("efficiency", pa.float64()),  # floor / duration
        ("wall", pa.string()),  # memory, compute, or overhead: most of the time is beyond the floor
        ("simulated", pa.bool_()),  # times are those of a model of a device, nothing was computed
        # of the Triton backend, else null
        ("padded_tokens", pa.int32()),  # rows computed for nobody: a step of decodes fills a CUDA graph's bucket
        ("drafted_tokens", pa.int32()),  # guesses checked beside the step's own tokens (n-gram speculation)
        ("accepted_tokens", pa.int32()),  # this step's tokens whose rows an earlier step's guesses had computed
    ]
)

#: Scraped metrics: one row per sample.
SERIES: Final = pa.schema(
    [
        ("t_s", pa.float64()),  # after clock zero
        ("source", pa.string()),  # target URL, or "generator"
        ("name", pa.string()),
        ("labels", pa.string()),  # JSON object
        ("value", pa.float64()),
    ]
)

TABLES: Final = {"requests": REQUESTS, "attempts": ATTEMPTS, "spans": SPANS, "steps": STEPS, "series": SERIES}
