"""Canaries: questions with known answers, asked of a server to see whether what it says is still right.

Recorded once on a server that is trusted, checked against any other: golden prompts (W1), drift of probabilities (W2),
task scores (W3) and probes of what options do (W5).  Statistics are in ``telemetry``; here is what talks to servers.
"""
