"""The pages, one file each: they ask ``facts``, draw with ``figures`` and decide nothing.

Each is a script of its own to Streamlit (``app.py`` lists them) and ends in ``frame.show(draw)``.
"""
