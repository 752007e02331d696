"""The HTTP server around one engine: OpenAI's API, health, metrics, the step log.

Read in this order: ``openai_api`` (what may be asked), ``exchange`` (one request from head to last byte), ``stream``
(engine thread -> event loop), ``responses`` (what is answered), ``tracing`` and ``metrics`` (what is reported of it),
``counts``, ``debug``, ``faults`` (what a tester may break), ``app`` (routes) and ``lifecycle`` (start, drain, stop).
"""
