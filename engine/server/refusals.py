"""The engine's refusals as HTTP answers: 400 for what can never be, 429 and 503 with Retry-After for the rest."""

from __future__ import annotations

import math

from engine.request import Overload, Refusal, RequestTooLong, TooSlow
from engine.server.openai_api import ApiError, Call, bad


def refused(call: Call, refusal: Refusal) -> ApiError:
    """The answer; 429 where the client sends too much, 503 where the server is too slow."""
    if isinstance(refusal, Overload):
        after = math.ceil(refusal.retry_after_s)
        message = f"{refusal}; try again later."
        if isinstance(refusal, TooSlow):
            return ApiError(503, message, kind="server_error", code=refusal.reason, retry_after=after)
        return ApiError(429, message, kind="rate_limit_error", code=refusal.reason, retry_after=after)
    param = "messages" if call.chat else "prompt"
    if isinstance(refusal, RequestTooLong):
        if call.max_tokens is not None and refusal.prompt_tokens < refusal.max_context:
            param = call.max_tokens_param
        return bad(str(refusal), param, "context_length_exceeded")
    return bad(str(refusal), param, refusal.reason)
