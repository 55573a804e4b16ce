"""The report page: one self-contained HTML file with charts and tables of a plan, a step and a run.

Contract: `page_html(page)` returns the text of a `Page` (frozen dataclasses of plain numbers and texts), `write_page(page,
path)` writes the file. This package knows schedules and timelines, not torch or models; `graphpp.planner` and
`graphpp.pipeline` fill the parts.
"""
