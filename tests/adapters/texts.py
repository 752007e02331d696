"""Metrics and answers of servers that cannot run here, written down from their public documentation and source.

SGLANG: docs, "Production metrics", and python/sglang/srt/observability/metrics_collector.py (names and labels).
TENSORRT_LLM: tensorrt_llm/metrics/collector.py and the metrics page of Dynamo's TensorRT-LLM backend.
TGI: router/src/server.rs (headers and names of histograms), with the labels of docs' metrics page.
LLAMA_CPP: tools/server/README.md (metrics; ``timings`` of an answer); recorded ones are beside it.
The numbers are those of two scrapes with ten requests between them.
"""

from __future__ import annotations

_SGLANG = """\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{model_name="m"}} {tokens}
# TYPE sglang:token_usage gauge
sglang:token_usage{{model_name="m"}} 0.28
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{model_name="m"}} 3.0
# TYPE sglang:queue_time_seconds histogram
sglang:queue_time_seconds_sum{{model_name="m",tp_rank="0"}} {queue}
sglang:queue_time_seconds_count{{model_name="m",tp_rank="0"}} {n}
# TYPE sglang:per_stage_req_latency_seconds histogram
sglang:per_stage_req_latency_seconds_sum{{model_name="m",stage="prefill_forward"}} {prefill}
sglang:per_stage_req_latency_seconds_count{{model_name="m",stage="prefill_forward"}} {n}
sglang:per_stage_req_latency_seconds_sum{{model_name="m",stage="request_process"}} 77.0
sglang:per_stage_req_latency_seconds_count{{model_name="m",stage="request_process"}} {n}
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_sum{{model_name="m"}} {ttft}
sglang:time_to_first_token_seconds_count{{model_name="m"}} {n}
# TYPE sglang:e2e_request_latency_seconds histogram
sglang:e2e_request_latency_seconds_sum{{model_name="m"}} {e2e}
sglang:e2e_request_latency_seconds_count{{model_name="m"}} {n}
"""
SGLANG = (
    _SGLANG.format(tokens=100, queue=5.0, prefill=2.0, ttft=8.0, e2e=40.0, n=20.0),
    _SGLANG.format(tokens=900, queue=7.0, prefill=3.0, ttft=11.5, e2e=73.5, n=30.0),
)

_TRTLLM = """\
# HELP trtllm_request_queue_time_seconds Histogram of time spent in WAITING phase for request.
# TYPE trtllm_request_queue_time_seconds histogram
trtllm_request_queue_time_seconds_count{{model_name="m",engine_type="trtllm"}} {n}
trtllm_request_queue_time_seconds_sum{{model_name="m",engine_type="trtllm"}} {queue}
# TYPE trtllm_request_prefill_time_seconds histogram
trtllm_request_prefill_time_seconds_count{{model_name="m",engine_type="trtllm"}} {n}
trtllm_request_prefill_time_seconds_sum{{model_name="m",engine_type="trtllm"}} {prefill}
# TYPE trtllm_request_decode_time_seconds histogram
trtllm_request_decode_time_seconds_count{{model_name="m",engine_type="trtllm"}} {n}
trtllm_request_decode_time_seconds_sum{{model_name="m",engine_type="trtllm"}} {decode}
# TYPE trtllm_kv_cache_utilization gauge
trtllm_kv_cache_utilization{{model_name="m",engine_type="trtllm"}} 0.41
"""
TENSORRT_LLM = (
    _TRTLLM.format(queue=1.0, prefill=0.5, decode=9.0, n=5.0),
    _TRTLLM.format(queue=4.0, prefill=1.5, decode=29.0, n=15.0),
)

_TGI = """\
# TYPE tgi_queue_size gauge
tgi_queue_size 2
# TYPE tgi_request_validation_duration histogram
tgi_request_validation_duration_sum {validation}
tgi_request_validation_duration_count {n}
# TYPE tgi_request_queue_duration histogram
tgi_request_queue_duration_sum {queue}
tgi_request_queue_duration_count {n}
# TYPE tgi_batch_forward_duration histogram
tgi_batch_forward_duration_sum{{method="prefill"}} {prefill}
tgi_batch_forward_duration_count{{method="prefill"}} {batches}
tgi_batch_forward_duration_sum{{method="decode"}} 30.0
tgi_batch_forward_duration_count{{method="decode"}} 500
# TYPE tgi_request_inference_duration histogram
tgi_request_inference_duration_sum {inference}
tgi_request_inference_duration_count {n}
"""
TGI = (
    _TGI.format(validation=0.05, queue=1.2, prefill=0.9, batches=10, inference=20.0, n=10),
    _TGI.format(validation=0.15, queue=3.2, prefill=1.9, batches=14, inference=45.0, n=20),
)
TGI_HEADERS = {
    b"x-compute-type": b"gpu+optimized",
    b"x-compute-time": b"1.52",
    b"x-total-time": b"1520",
    b"x-validation-time": b"2",
    b"x-queue-time": b"118",
    b"x-inference-time": b"1400",
    b"x-time-per-token": b"14",
    b"x-prompt-tokens": b"31",
    b"x-generated-tokens": b"100",
}

_LLAMA_CPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total {tokens}
# HELP llamacpp:prompt_seconds_total Prompt process time
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total {prompt}
# HELP llamacpp:tokens_predicted_seconds_total Predict process time
# TYPE llamacpp:tokens_predicted_seconds_total counter
llamacpp:tokens_predicted_seconds_total {predicted}
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 7
"""
LLAMA_CPP = (
    _LLAMA_CPP.format(tokens=100, prompt=4.0, predicted=2.0),
    _LLAMA_CPP.format(tokens=900, prompt=6.0, predicted=12.0),
)
LLAMA_CPP_TIMINGS = {
    "cache_n": 0,
    "prompt_n": 31,
    "prompt_ms": 80.0,
    "prompt_per_token_ms": 2.58,
    "prompt_per_second": 387.5,
    "predicted_n": 3,
    "predicted_ms": 40.0,
    "predicted_per_token_ms": 13.3,
    "predicted_per_second": 75.0,
}
