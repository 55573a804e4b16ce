"""Note the calls of modules on the nodes of a trace that runs the modules themselves, as `torch.export` does.

Contract: while `note_module_calls` is open, every traced operation has `nn_module_stack` in its metadata: the calls around the
operation, hooks of modules included, outermost first, each under the module's FQN and, from a module's second call on, `@k`.
Each call of the root begins to count anew, and runs within the context `around`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from torch import nn

from graphpp._torch import aot


@contextlib.contextmanager
def note_module_calls(root: nn.Module, around: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """While open, calls of the modules under `root` are noted."""
    names = {id(module): name for name, module in root.named_modules()}
    seen = Counter[str]()

    @contextlib.contextmanager
    def noted(module: nn.Module) -> Iterator[None]:
        name = names.get(id(module))
        if name is None:
            yield
            return
        if module is root:
            seen.clear()
        again, seen[name] = seen[name], seen[name] + 1
        key = f"{name}@{again}" if again else name
        with around() if module is root else contextlib.nullcontext(), aot.within_module(key, name, type(module)):
            yield

    with aot.notes_kept(), aot.calls_within(noted):
        yield
