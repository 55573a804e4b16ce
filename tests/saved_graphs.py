"""The folder through which tests of one session share captured graphs: `graphpp.compile(artifact=GRAPHS)`.

A capture takes most of a short training's time, and most tests are about what follows it. Tests of captures leave
`artifact` out.
"""

import os
from pathlib import Path

GRAPHS = Path(os.environ["GRAPHPP_CACHE"]) / "graphs" if "GRAPHPP_CACHE" in os.environ else None
