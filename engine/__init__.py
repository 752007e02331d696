"""The bundled inference engine: one thread owns all state; a server talks to it by queues.

Read in this order: ``config``, ``request``, ``phase_clock``, ``blocks``, ``scheduler``, ``runner_cpu``, ``sampling``,
``detokenizer``, ``core``; then ``server/``.
"""
