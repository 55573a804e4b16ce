"""Compare the initial values of tensors that several ranks have, once, before the first training step.

- Values must be equal between ranks along `tp` (unsharded tensors), between replicas (except experts along `ep`), and between
  ranks with the same experts. With `replica_values="broadcast"` the first replica sends its values instead.
- Ranks compare checksums; a difference raises `MismatchError` with the tensor's name on all ranks. Parameters sharded since are
  compared by their checksums before sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from graphpp.options.options import Options
from graphpp.ownership.ownership import Ownership
from graphpp.parallel.agreement import Agreement, Round
from graphpp.parallel.checksum import checksum
from graphpp.parallel.data_parallel import broadcast_
from graphpp.parallel.facts import Facts
from graphpp.parallel.rank_place import RankPlace
from graphpp.runtime.dtensors import is_cut_along, is_spread_over, local_tensor
from graphpp.runtime.model_state import ModelState


class InitialValues:
    """Compares this rank's values with those of other ranks. `known`: whether this is done."""

    def __init__(
        self, options: Options, place: RankPlace, replicas: Agreement, ownership: Ownership, state: ModelState
    ) -> None:
        self._replicas = replicas
        self._broadcasts = options.parallel.replica_values == "broadcast" and place.replicas is not None
        self._place, self._ownership, self._state = place, ownership, state
        self._along_layers = place.agreement(place.tp_group)
        self._along_experts = None if place.experts is None else place.agreement(place.experts.replicas)
        along = {} if place.experts is None else place.experts.along
        self._along_dims = {dim: place.agreement(group) for dim, group in sorted(along.items())}
        self.known = False

    def compare_shared_layers(self, pipeline: Agreement) -> None:
        """Compare with the ranks along `tp`. Called by all ranks of a pipeline, whose `Agreement` this is."""
        if self._along_layers.several and not self.known:
            with Round(self._along_layers, pipeline) as r:
                r.compare(self._of_shared_layers())

    def of_replica(self) -> Mapping[str, Sequence[str]]:
        """The lines that must be equal on all replicas."""
        if self.known or not self._replicas.several:
            return {}
        return self._of_tensors() if self._broadcasts else self._checksums(self._ownership.local - self._ownership.experts)

    @property
    def sends(self) -> bool:
        return self._broadcasts and not self.known

    def send(self) -> None:
        """Copy the first replica's values to all replicas. Called by all replicas."""
        sharded, replicas = self._ownership.sharded, self._place.replicas
        assert replicas is not None, "values are sent to replicas only"
        own = [fqn for fqn in sorted(self._ownership.local) if sharded is None or fqn not in sharded]
        broadcast_([local_tensor(self._state.tensor(fqn)) for fqn in own], replicas)

    def finish(self, pipeline: Agreement) -> None:
        """Compare experts with the replicas that have the same ones. Called by all replicas, on all ranks of each pipeline."""
        if self._along_experts is not None and not self.known:
            with Round(self._along_experts, self._replicas, pipeline) as r:
                r.compare(Facts(self._checksums(self._ownership.experts)))
            for dim, agreement in self._along_dims.items():
                whole = {fqn for fqn in self._ownership.experts if not is_cut_along(self._state.tensor(fqn), dim)}
                with Round(agreement, self._replicas, pipeline) as r:
                    r.compare(Facts(self._checksums(whole)))
        self.known = True

    def _of_tensors(self) -> Mapping[str, Sequence[str]]:
        tensors = {fqn: self._state.tensor(fqn) for fqn in sorted(self._ownership.local)}
        lines = [f"{fqn}: {list(each.shape)} {each.dtype}" for fqn, each in tensors.items()]
        return {"the tensors of its stages": lines}

    def _of_shared_layers(self) -> Facts:
        advice = (
            "which every rank along tp has whole and must have equal (seed all ranks alike, or make the parameter a DTensor "
            "where each rank has another part)"
        )
        tensors = {fqn: self._state.tensor(fqn) for fqn in sorted(self._ownership.local)}
        apart = self._ownership.experts if self._place.folds_experts else ()  # `finish` compares equal ones
        whole = {
            fqn: each for fqn, each in tensors.items() if fqn not in apart and not is_spread_over(each, self._place.tp_group)
        }
        return Facts(_lines({fqn: checksum(local_tensor(each)) for fqn, each in whole.items()}, advice))

    def _checksums(self, fqns: Set[str]) -> Mapping[str, Sequence[str]]:
        spread = self._place.experts is not None
        experts = "; an expert, of which each rank along ep has another, is a DTensor over ep" if spread else ""
        advice = f"with which replicas must begin alike (seed all ranks alike, or load one state dict on all{experts})"
        before = self._ownership.values_before_sharding
        own = {fqn: before[fqn] if fqn in before else checksum(local_tensor(self._state.tensor(fqn))) for fqn in sorted(fqns)}
        return _lines(own, advice)


def _lines(sums: dict[str, int], advice: str) -> Mapping[str, Sequence[str]]:
    return {f"the values of {fqn}, {advice}": [f"bits that add up to {found}"] for fqn, found in sums.items()}
