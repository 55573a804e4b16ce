"""The report page: one HTML file with charts and tables of a plan, a step and a run, which needs no network.

Contract
    in   a `Page`: frozen dataclasses of plain numbers and texts; every part that is empty leaves its section out
    out  `page_html(page)`: the text of the file; `write_page(page, path)`: the file
    This package knows schedules and timelines, no torch and no models. `graphpp.planner` and `graphpp.pipeline` fill the parts.
"""
