"""`python -m tests.tutorials [PAGE..]`: write the scripts of the tutorials, and their outputs into the pages."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.tutorials.pages import PAGES, SCRIPTS, scripts, written

for page in [page for page in PAGES if page.stem in sys.argv[1:] or not sys.argv[1:]]:
    for name, source in scripts(page.read_text()).items():
        (SCRIPTS / name).write_text(source)
    with TemporaryDirectory() as folder:
        page.write_text(written(page.read_text(), Path(folder)))
    print(f"wrote {page.name}")
