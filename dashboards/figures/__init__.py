"""Charts beyond those of the run page (``dashboards.charts``), a file a kind: rows in, an Altair chart out.

They draw and decide nothing; their data passes ``charts.marks``, which refuses more marks than a page can draw.
"""
