"""What people look at: the Streamlit page, and the commands that start everything around it.

Pages only draw: every figure comes from a plain function of ``telemetry`` over a run bundle.  The engine and the load
generator are started as processes and never imported.
"""
