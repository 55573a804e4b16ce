"""Published training runs as data: the schema, its checks, and the model FLOPs of each convention. Imports no torch.

    RUNS = read_runs()  # all runs of benchmarks/published/*.json, by file and in the order of the files
    RUNS[0].tokens  # tokens per second and GPU, from whichever figure was published

The files and the fields that these runs share with the models tried are those of `run_files.py`. A file with an unknown
field, a mesh that does not have the run's GPUs, or a batch that its ranks cannot share raises `GraphPPError` that names the
entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from run_files import AnyRun, Layout, read_folder, require

FOLDER = Path(__file__).parent / "published"
FAMILIES = ("llama", "gpt", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")
KERNELS = ("eager", "partly", "compile", "fused")
DISPATCHES = ("experts", "machines")
PRODUCTS = ("grouped", "single")
LOSSES = ("whole", "fused")
REDUCED = (None, "float32", "bfloat16")
CASTS = ("step", "computation", "shards")
ATTENTIONS = ("unfused", "flash 1", "flash 2", "newest")
PRECISIONS = ("bfloat16", "float8 tensorwise", "float8 rowwise")
SCHEDULES = ("loop", "1F1B", "interleaved", "ZB1P", "ZB2P", "DualPipeV")
DEVICES = {"A100": 312e12, "A100 40 GB": 312e12, "H100": 989e12, "H100 96 GB": 989e12, "H800": 989e12, "H200": 989e12}
"""The devices of the runs, and their dense FLOP/s in bfloat16, of which an MFU is a fraction."""


@dataclass(frozen=True)
class Flops:
    """A convention of model FLOPs: `attention`: the part of the square of scores that counts; `embedding`: whether the tables
    of words and positions count as products; `blocks`: passes through the blocks per step, a backward being two."""

    attention: float
    embedding: bool = False
    blocks: int = 3


CONVENTIONS = {
    "full": Flops(1.0),
    "causal": Flops(0.5),
    "full, all parameters": Flops(1.0, embedding=True),
    "full, recomputed": Flops(1.0, blocks=4),
}


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: ranks of queries and of keys with values, and widths of a head."""

    queries: int
    keys: int
    plain: int
    rotary: int
    values: int


@dataclass(frozen=True)
class Model:
    """A decoder. `head`: width of a head; `ffn`: of a dense MLP (gated, except for "gpt"); `expert_ffn`: of one expert;
    `shared`: experts for all tokens; `dense`: first layers without experts; `mtp`: layers that predict a further token;
    `learned`: whether positions are a table."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocabulary: int
    tied: bool = False
    learned: bool = False
    experts: int = 0
    per_token: int = 0
    expert_ffn: int = 0
    shared: int = 0
    dense: int = 0
    mtp: int = 0
    latent: Latent | None = None

    def __post_init__(self) -> None:
        require(self.family in FAMILIES, f"family: take {', '.join(FAMILIES)}, got {self.family!r}")
        require(self.heads % self.kv_heads == 0, f"kv_heads: {self.kv_heads} do not divide {self.heads} heads")
        require(self.per_token <= self.experts, f"per_token: {self.per_token} of {self.experts} experts")

    @property
    def attention_weights(self) -> int:
        if (it := self.latent) is None:
            return self.hidden * self.head * 2 * (self.heads + self.kv_heads)
        keys = self.hidden * (it.keys + it.rotary) + it.keys * self.heads * (it.plain + it.values)
        queries = self.hidden * it.queries + it.queries * self.heads * (it.plain + it.rotary)
        return keys + queries + self.heads * it.values * self.hidden

    @property
    def score_width(self) -> float:
        """The width of queries and keys, and that of values, on average: FLOPs per pair of tokens and layer are four times."""
        it = self.latent
        return self.heads * (self.head if it is None else (it.plain + it.rotary + it.values) / 2)

    def block_weights(self, *, active: bool) -> int:
        """Weights of all blocks; `active`: those that one token meets."""
        matrices = 2 if self.family == "gpt" else 3
        dense = self.attention_weights + matrices * self.hidden * self.ffn
        if not self.experts:
            return dense * (self.layers + self.mtp)
        routed = (self.per_token if active else self.experts) + self.shared
        sparse = self.attention_weights + 3 * self.hidden * self.expert_ffn * routed + self.hidden * self.experts
        mixed = self.mtp * 2 * self.hidden**2  # joins the embedding and the hidden state of a predicted token
        return self.dense * dense + (self.layers - self.dense + self.mtp) * sparse + mixed

    def parameters(self, length: int) -> int:
        """Weights without biases and norms, which are below 0.1 %."""
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.learned * length * self.hidden
        return self.block_weights(active=False) + tables

    def flops(self, length: int, convention: str) -> float:
        """Model FLOPs of one token in one step under a name of `CONVENTIONS`."""
        one, word_products = CONVENTIONS[convention], self.vocabulary * self.hidden
        tables = word_products * (not self.tied) + self.learned * length * self.hidden if one.embedding else 0
        scores = 4 * one.attention * length * self.score_width * (self.layers + self.mtp)
        head = 6 * (word_products * (1 + self.mtp) + tables)
        return one.blocks * (2 * self.block_weights(active=True) + scores) + head


@dataclass(frozen=True)
class Fleet:
    """The machines. `power`: the limit of a GPU in watts; `network`: Gb/s of one GPU to other machines; None: not said."""

    device: str
    gpus: int
    per_machine: int = 8
    power: int | None = None
    network: float | None = None

    def __post_init__(self) -> None:
        require(self.device in DEVICES, f"device: take {', '.join(DEVICES)}, got {self.device!r}")
        require(self.gpus % min(self.gpus, self.per_machine) == 0, f"gpus: {self.gpus} do not fill machines")


@dataclass(frozen=True, kw_only=True)
class Settings(Layout):
    """How a run was set. `dp`: ranks with rows of their own, in groups of `shard` (None: all) that share one copy of what ZeRO
    `zero` shards (3: FSDP; 0: nothing). `ep` divides `dp`, or with `etp` (None: not said; ranks that divide one expert) all
    ranks of a stage. Several `stages`: not said, and the fastest counts. `recompute`: "none", "selective", "full", a fraction
    of the layers, or words that name what. `attention`: its kernel; `kernels`: of other operators ("partly": some are fused
    by hand, as in Megatron before 2024). `overlap`: names. `dispatch`: how often a token travels: once to each of its
    experts, or to each of their machines. `experts`: whether their products are one kernel or single ones, as of Transformer
    Engine. `loss`: whether logits are copied to float32, or read by a kernel for the loss. `reduce_dtype`, `casts`: as in the
    planner's `Deployment` (None: not said)."""

    length: int
    attention: str
    dropout: float = 0.0
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    shard: int | None = None
    zero: int = 3
    sequence_parallel: bool | None = None
    recompute: str | float | None = "none"
    kernels: str = "fused"
    overlap: tuple[str, ...] = ()
    dispatch: str = "experts"
    experts: str = "grouped"
    loss: str = "whole"
    reduce_dtype: str | None = None
    casts: str = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        words = {
            "schedule": SCHEDULES, "precision": PRECISIONS, "kernels": KERNELS, "attention": ATTENTIONS, "dispatch": DISPATCHES,
            "reduce_dtype": REDUCED, "casts": CASTS, "experts": PRODUCTS, "loss": LOSSES,
        }  # fmt: skip
        for name, known in words.items():
            require((value := getattr(self, name)) in known, f"{name}: take {', '.join(map(str, known))}, got {value!r}")
        require(min(self.length, self.tp, self.cp, self.ep) > 0, "length, tp, cp, ep: numbers from 1")
        require(self.zero in range(4), f"zero: take 0 to 3, got {self.zero}")
        require((self.pp == 1) == (self.schedule == "loop"), f"schedule: {self.schedule} with pp {self.pp}")
        require(self.dp % (self.shard or 1) == 0, f"shard: {self.shard} does not divide dp {self.dp}")
        inside, within = (self.dp, self.ep) if self.etp is None else (self.tp * self.cp * self.dp, self.ep * self.etp)
        require(inside % within == 0, f"ep: {self.ep} x etp {self.etp} does not divide {inside} ranks")

    @property
    def ranks(self) -> int:
        return prod((self.dp, self.tp, self.pp, self.cp))


@dataclass(frozen=True)
class Result:
    """The published figures: tokens per second and GPU, seconds of a step, TFLOP/s of a GPU and MFU in percent under a
    convention `flops`, peak memory of a GPU in `unit`; `fits`: False for a run that was out of memory."""

    tokens: float | None = None
    seconds: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    flops: str | None = None
    memory: float | None = None
    unit: str = "GiB"
    fits: bool = True

    def __post_init__(self) -> None:
        given = [each for each in (self.tokens, self.seconds, self.tflops, self.mfu, self.memory) if each is not None]
        require(bool(given) == self.fits and all(each > 0 for each in given), "result: positive figures, or fits: false")
        named = self.flops in CONVENTIONS if self.tflops or self.mfu else self.flops is None
        require(named, f"flops: take {', '.join(CONVENTIONS)} with tflops or mfu, and only then; got {self.flops!r}")
        require(self.unit in ("GB", "GiB"), f"unit: take GB or GiB, got {self.unit!r}")


@dataclass(frozen=True, kw_only=True)
class Run(AnyRun):
    """A published run. `table`: where in the source; `assumed`: what the source does not say; `cannot`: why the planner cannot
    express it (None: it can); `documented`: whether docs/planner/published.md has it; `unverified`: from memory alone."""

    table: str
    architecture: Model
    machines: Fleet
    settings: Settings
    result: Result
    assumed: tuple[str, ...] = ()
    cannot: str | None = None
    documented: bool = False
    unverified: bool = False

    def __post_init__(self) -> None:
        ranks, gpus = self.settings.ranks, self.machines.gpus
        require(ranks == gpus, f"settings: dp x tp x pp x cp is {ranks}, machines have {gpus} GPUs")
        require(self.settings.ep == 1 or self.architecture.experts % self.settings.ep == 0, f"settings.ep: {self.settings.ep}")
        require(self.architecture.kv_heads % self.settings.tp == 0 or self.cannot, f"settings.tp: {self.settings.tp}")
        require(self.unverified == (self.source.seen == "memory"), "unverified: true for a source from memory, and only then")

    def rates(self) -> dict[str, float]:
        """Tokens per second and GPU by each published figure."""
        it, gpus = self.result, self.machines.gpus
        per_token = self.architecture.flops(self.settings.length, it.flops) if it.flops else 1.0
        step = self.settings.batch * self.settings.length
        given = {
            "tokens": it.tokens, "seconds": it.seconds and step / it.seconds / gpus,
            "tflops": it.tflops and it.tflops * 1e12 / per_token,
            "mfu": it.mfu and it.mfu / 100 * DEVICES[self.machines.device] / per_token,
        }  # fmt: skip
        return {name: rate for name, rate in given.items() if rate is not None}

    @property
    def tokens(self) -> float | None:
        """Tokens per second and GPU by the first figure of `rates`; None if only bytes were published."""
        return next(iter(self.rates().values()), None)


def read_runs(folder: Path = FOLDER) -> tuple[Run, ...]:
    """The runs of all files of a folder. Raises `GraphPPError` for a file that is not valid, and for a name given twice."""
    return read_folder(folder, Run, Model)
