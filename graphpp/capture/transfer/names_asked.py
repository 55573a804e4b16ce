"""What keeps two processes from being compared: the error, and names in code that asks for what is not in its objects."""

from __future__ import annotations

ENVIRONMENT = frozenset(("environ", "getenv"))  # names in code that reads the variables of the environment
PER_PROCESS = frozenset(  # names in code that asks for the process, its place among others, or its time
    ("get_rank", "get_local_rank", "get_node_local_rank", "get_group_rank", "get_coordinate", "current_device",
     "getpid", "gethostname", "urandom", "uuid4", "new_group", "init_device_mesh", "init_process_group")
)  # fmt: skip
HIDDEN = frozenset(  # names in code that finds objects of which no variable, attribute or closure tells
    ("eval", "_getframe", "currentframe", "getouterframes", "f_globals", "f_back", "__globals__", "__subclasses__", "__code__",
     "get_objects", "get_referrers", "current_thread", "main_thread", "getLogger", "getsource", "getsourcelines", "getmodule",
     "initial_seed", "cpu_count", "device_count")
)  # fmt: skip
KNOWN_QUERIES = frozenset(  # functions of torch that ask for what a key has, or for what a tensor is
    ("is_tensor", "is_floating_point", "is_complex", "is_storage", "is_same_size", "is_available", "is_compiling",
     "is_exporting", "is_scripting", "is_tracing", "is_grad_enabled", "is_inference_mode_enabled", "is_inference",
     "is_autocast_enabled", "is_deterministic_algorithms_warn_only_enabled", "is_parametrized", "is_pruned",
     "get_default_dtype", "get_default_device", "get_autocast_dtype", "get_float32_matmul_precision",
     "are_deterministic_algorithms_enabled")
)  # fmt: skip


class UnreadableError(Exception):
    """An object of the model or the loss of which the walk cannot tell whether another process has the same."""
