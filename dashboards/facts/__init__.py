"""What a page asks of a run, a file a question: plain functions over ``source.Source``, without Streamlit.

Must always hold: labels come from the verdicts and phases from ``telemetry.phases``, so that a page counts what the
command line counts; every answer is small, a few thousand rows at most, whatever the size of the run.
"""
