"""The causes that can be named: in words, whom to ask, and what would disprove each.

Owns the vocabulary of explain's verdicts: (class, cause).  Classes are the labels late, dropped and wrong, beside
``INVALID`` (the run itself) and ``NOTHING``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from telemetry import names

NOTHING: Final = "none"  # no significant change
LATE: Final = names.LATE
DROPPED: Final = names.DROPPED
WRONG: Final = names.WRONG
INVALID: Final = names.INVALID

APPLICATION: Final = "application"
RUNTIME: Final = "runtime"
INFRASTRUCTURE: Final = "infrastructure"
TOOLING: Final = "tooling"

UNKNOWN: Final = "unknown"
NO_CHANGE: Final = "no_change"
CLIENT: Final = "client"


@dataclass(frozen=True, slots=True)
class Cause:
    """name: the code.  words: the hypothesis in plain words.  layer: whom to ask.  disprove: the check against it.
    workload: it lies in what was asked of the server, not in the server."""

    name: str
    label: str
    words: str
    layer: str
    disprove: str
    workload: bool = False


def _table(*causes: Cause) -> dict[str, Cause]:
    return {one.name: one for one in causes}


#: By code.  The order within a label is that of the tables in docs/explain.md.
CAUSES: Final = _table(
    # late
    Cause("arrivals", LATE, "requests arrive faster or in denser bursts", APPLICATION,
          "replay B's trace at A's rate: if it stays slow, arrivals are not the cause", True),
    Cause("prompt_lengths", LATE, "prompts are longer; within each length nothing changed", APPLICATION,
          "compare requests of equal prompt length: if those are slower too, the mix is not the cause", True),
    Cause("output_lengths", LATE, "answers are longer; within each length nothing changed", APPLICATION,
          "compare time per output token at equal batch: if it rose, lengths are not the cause", True),
    Cause("cache_misses", LATE, "fewer prompt tokens come from the prefix cache, so more are computed", APPLICATION,
          "replay with the prefix cache off on both sides: if the difference stays, the cache is not the cause"),
    Cause("engine_speed", LATE, "every step takes longer at the same batch", INFRASTRUCTURE,
          "run A's build on B's machine, and watch clocks and neighbours: if A is fast there, it is B's build"),
    Cause("batch_size", LATE, "more requests share a step: each token waits for a larger batch", RUNTIME,
          "set B's batch and token limits to A's: if the gaps stay, limits are not the cause"),
    Cause("batch_limit", LATE, "fewer requests may run together, so that they wait for a place", RUNTIME,
          "set B's batch and token limits to A's: if the wait stays, limits are not the cause"),
    Cause("kv_pressure", LATE, "the KV pool is too small: requests lose their pages and are computed again", RUNTIME,
          "give B the KV pages of A, or halve the load: if preemptions stay, the pool is not the cause"),
    Cause("host_stall", LATE, "the engine stands still between steps while work is waiting", INFRASTRUCTURE,
          "look for pauses in the step log's gaps: if there are none, the host does not stall"),
    Cause("cold_start", LATE, "the first steps of their kind take much longer: something is compiled or loaded anew",
          RUNTIME, "warm the server with the same shapes before the replay: if it stays slow, it is not cold"),
    Cause("network", LATE, "time is lost between client and server, or in writing the answer", INFRASTRUCTURE,
          "run the load generator on the server's own machine: if it stays slow, it is not the network"),
    Cause("front_end", LATE, "time is lost before the queue: reading requests, tokenizing", RUNTIME,
          "measure the event loop's lag and the tokenizer alone: if they are as before, it is not the front end"),
    Cause("replica", LATE, "one replica is slower than the others", INFRASTRUCTURE,
          "take the replica out: if the rest is slow too, it is not the replica"),
    # dropped
    Cause("capacity", DROPPED, "more work arrives than the server can do: requests time out in the queue", RUNTIME,
          "halve the load: if requests are still dropped, capacity is not the cause"),
    Cause("rejected", DROPPED, "the admission policy turns requests away while the server has room", RUNTIME,
          "lift the queue limit: if as many are dropped by time-outs then, it was capacity"),
    Cause("retries", DROPPED, "retries of timed-out requests multiply the load, and it does not recover", APPLICATION,
          "replay without retries: if it does not recover either, retries are not the cause"),
    Cause("kv_oom", DROPPED, "the KV pool is smaller than what single requests need", RUNTIME,
          "give B the KV pages of A: if requests are still refused, the pool is not the cause"),
    Cause("kv_fragmentation", DROPPED, "KV allocation fails while enough of the pool is free", RUNTIME,
          "compare free pages at the failures with what was asked for: if less was free, it is capacity"),
    Cause("context_overflow", DROPPED, "prompts exceed the context of the model as it is served", APPLICATION,
          "send one such prompt alone: if it is answered, its length is not the cause"),
    Cause("long_context", DROPPED, "a few over-long contexts hold the pool or the step, and the others go under",
          APPLICATION, "replay without the longest requests: if the others are still dropped, they are not the cause"),
    Cause("stream_cut", DROPPED, "streams end without a finish reason", INFRASTRUCTURE,
          "go around the proxy and ask the server directly: if streams still end early, it is the server"),
    Cause("reset", DROPPED, "connections are reset under way", INFRASTRUCTURE,
          "go around the proxy and ask the server directly: if resets stay, it is the server"),
    Cause("refused", DROPPED, "the server does not accept connections", INFRASTRUCTURE,
          "ask its health endpoint from the same machine: if it answers, it is the way to it"),
    Cause("hang", DROPPED, "requests are running but no token is made: the scheduler stands still", RUNTIME,
          "watch the token counters while requests run: if they move, it is slow and not hung"),
    Cause("server_error", DROPPED, "the server fails with an error of its own", RUNTIME,
          "send the same requests alone: if they fail too, look at the request; else at concurrency"),
    # wrong
    Cause("tokenizer", WRONG, "prompts have another number of tokens, in proportion to their length: another tokenizer",
          TOOLING, "compare the tokenizer files' hashes: if they are equal, it is not the tokenizer"),
    Cause("template", WRONG, "every prompt has the same number of tokens more or fewer: another chat template or BOS",
          TOOLING, "send one prompt without a template: if its count is right, the template is the cause"),
    Cause("other_model", WRONG, "another model answers than the one that was asked", TOOLING,
          "ask the server for its models: if the right one is served alone, it is not the model"),
    Cause("sampling", WRONG, "sampling parameters are not honoured", RUNTIME,
          "ask 8 times at temperature 1.2: if the answers differ, the parameters are honoured"),
    Cause("truncated", WRONG, "answers end at one fixed length that nobody asked for", RUNTIME,
          "ask for a long answer alone: if it is longer than that, no cap is the cause"),
    Cause("non_finite", WRONG, "the model computes values that are not finite", RUNTIME,
          "restart the replica and send the same prompts: if the garbage stays, weights are damaged"),
    Cause("loop", WRONG, "answers repeat themselves until their limit: the end of text is never chosen", RUNTIME,
          "ask with a stop string: if the answers end well, only the end token is lost"),
    Cause("numeric_drift", WRONG, "probabilities have moved a little everywhere: another precision or kernel", RUNTIME,
          "compare log-probabilities of the reference text: if they agree within the noise, it is no drift"),
    Cause("concurrency", WRONG, "answers are right alone and wrong under load", RUNTIME,
          "repeat the canaries while idle: if they fail there too, concurrency is not the cause"),
    Cause("prefix_cache", WRONG, "answers are wrong where the prompt came from the prefix cache", RUNTIME,
          "repeat with the prefix cache off: if they fail there too, the cache is not the cause"),
    Cause("text", WRONG, "text is damaged on its way: lost bytes, control tokens, empty answers", RUNTIME,
          "read the token ids of such an answer: if they are right, it is the detokenizer or the stream"),
    Cause("broken_model", WRONG, "answers to known questions are wrong: weights or kernels", RUNTIME,
          "run the canaries on a trusted build with the same files: if they fail too, the files are damaged"),
)  # fmt: skip
