"""When a rank dies: every other rank ends with an error that names it.

Contract: the first rank that notices writes who is lost into the store all ranks share; who notices later, because its own
neighbour went down in turn, reads it there. A rank that fails by itself writes its own name and error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from graphpp.errors import GraphPPError, RankFailure
from graphpp.runtime._torch_pipelining import default_store
from graphpp.runtime.transport import PeerLost

_KEY = "graphpp/lost"


class FailureBoard:
    """Turns a broken message into a `RankFailure` that names the rank that was lost first."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one step: a lost peer becomes `RankFailure`, an own failure is made known to the others."""
        try:
            yield
        except PeerLost as error:
            raise RankFailure(self._explain(error)) from error
        except GraphPPError:
            raise
        except Exception as error:
            if self._group is not None:
                self._publish(f"rank {dist.get_rank(self._group)} failed with {type(error).__name__}: {error}")
            raise

    def _explain(self, error: PeerLost) -> str:
        known = self._publish(f"rank {error.peer} is lost")
        return (
            f"{known}; this rank ({dist.get_rank(self._group)}) was waiting for rank {error.peer}: {error}. "
            "The step cannot be finished: restart all ranks from the last checkpoint, and look at that rank's log."
        )

    def _publish(self, text: str) -> str:
        """Write what happened unless somebody has; returns what stands there. The store may be gone with its host."""
        try:
            store = default_store()
            store.set_timeout(timedelta(seconds=5))
            return str(store.compare_set(_KEY, "", text).decode()) or text
        except Exception:
            return text
