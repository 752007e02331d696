"""The load generator: traces to schedules to requests, sent open loop, timed, and written down."""
