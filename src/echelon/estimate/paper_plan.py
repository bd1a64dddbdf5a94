"""`echelon plan` for devices that are not here: bytes of each, whether it fits, what travels in a step, and how fast it could be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from echelon.checkpoint.facts import context_of
from echelon.config import EngineConfig
from echelon.errors import ConfigError, UnsupportedModelError
from echelon.estimate.devices import Device
from echelon.estimate.drafting import Acceptance, DraftingCost, acceptance_of, drafting_of
from echelon.estimate.layout import Pass, StagePart, split_among
from echelon.estimate.shapes import PaperModel
from echelon.estimate.speed import Cluster, Speed
from echelon.memory.footprint import attention_shapes, pass_bytes
from echelon.memory.lower_bound import SHAPES as DRAFT_SHAPES
from echelon.memory.plan import DEVICE_RUNTIME, LOGIT_BYTES, fed_tokens
from echelon.model.patches.split import fitting_ranks
from echelon.speculative_config import SpeculativeConfig, most_drafted

MOST_DEVICES = 512


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of one device at their peak, by what they are for."""

    stage: int
    rank: int
    layers: int
    weights: int
    draft_weights: int
    keys_and_values: int
    activations: int
    runtime: int = DEVICE_RUNTIME

    @property
    def total(self) -> int:
        """In all."""
        return self.weights + self.draft_weights + self.keys_and_values + self.activations + self.runtime


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that travel in a step of so many tokens: what all tensor ranks get in gathers, how much of it
    logits are, and hidden states from stage to stage.
    """

    gathered: int
    logits: int
    hidden_states: int


@dataclass(frozen=True)
class SpeedLine:
    """Plain and speculative decoding of so many rows; `pays_from`: tokens a step with which they would be equally fast."""

    plain: Speed
    drafted: int = 0
    tokens_per_step: float = 1.0
    speculative: Speed | None = None

    @property
    def speculative_speed(self) -> float:
        """Tokens a second with drafts, or without where nothing drafts."""
        return (self.speculative or self.plain).tokens_per_second

    @property
    def gain(self) -> float:
        """Speculative over plain."""
        return self.speculative_speed / self.plain.tokens_per_second

    @property
    def pays_from(self) -> float:
        """Tokens a step."""
        return self.tokens_per_step / self.gain


class PaperPlan:
    """A model without weights on `ranks` × `stages` devices, with the rows and lengths of `config`, and drafts of `spec` if there are any.

    Raises
    ------
    ConfigError, UnsupportedModelError  the sizes do not divide it, or something of it cannot be planned on paper
    """

    def __init__(
        self,
        planned: PaperModel,
        device: Device,
        ranks: int,
        stages: int,
        config: EngineConfig,
        spec: SpeculativeConfig | None = None,
        tokens_per_step: float | None = None,
    ) -> None:
        for name in ("memory", "gpu_memory_utilization"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name} belongs to a plan for this machine; on paper leave it out")
        planned = planned._replace(quantization=config.quantization)
        self.planned, self.model, self.device, self.ranks, self.config = planned, planned.model, device, ranks, config
        self._is_rounded = config.kv_cache_dtype == "int8"
        device.flops(planned.dtype_name)
        self.cluster = self._cluster(ranks, stages)
        self.spec, self._acceptance = spec, acceptance_of(spec, tokens_per_step) if spec is not None else None
        self.max_len = config.max_model_len or context_of(planned.model.config)

    def _cluster(self, ranks: int, stages: int) -> Cluster:
        planned = self.planned
        parts = split_among(planned, ranks, stages, self._is_rounded)
        return Cluster(parts, self.device, planned.dtype_name, planned.hidden_size, planned.dtype.itemsize)

    @property
    def context(self) -> int:
        """Tokens that a row has on average, half of the most."""
        return self.max_len // 2

    @cached_property
    def drafting(self) -> DraftingCost | None:
        """The most that is drafted."""
        return self._drafting(self.spec.most_tokens) if self.spec is not None else None

    def _drafting(self, drafted: int) -> DraftingCost:
        assert self.spec is not None and isinstance(self._acceptance, Acceptance)
        return drafting_of(self.spec, self.planned, self._acceptance, drafted, self.config.dtype, self._is_rounded)

    @cached_property
    def device_bytes(self) -> list[DeviceBytes]:
        """Of every device, by stage and rank."""
        return self._bytes_of(self.cluster)

    def _bytes_of(self, cluster: Cluster) -> list[DeviceBytes]:
        return [self._bytes(part) for ranks in cluster.stages for part in ranks]

    def _bytes(self, part: StagePart) -> DeviceBytes:
        rows, nodes = self.config.max_num_seqs, most_drafted(self.spec)
        size, is_first = self.planned.dtype.itemsize, part.stage == part.rank == 0
        vocabulary = int(self.model.get_output_embeddings().weight.shape[0])
        logits = rows * (1 + nodes) * vocabulary * LOGIT_BYTES if is_first else 0
        drafting = self.drafting if is_first else None
        return DeviceBytes(
            part.stage,
            part.rank,
            part.held.layers,
            part.weight_bytes(size),
            drafting.numbers * size if drafting is not None else 0,
            rows * (self.max_len + nodes) * (part.held.kv_bytes + (drafting.kv_bytes if drafting is not None else 0)),
            fed_tokens(self.config, self.spec, self.max_len) * self._pass_bytes + logits,
        )

    @cached_property
    def _pass_bytes(self) -> int:
        layers, num_heads = attention_shapes(self.model)
        return pass_bytes(self.model, layers, num_heads, self.planned.dtype)

    @property
    def fits(self) -> bool:
        """Whether every device has room."""
        return self._has_room(self.device_bytes)

    def _has_room(self, found: list[DeviceBytes]) -> bool:
        return max(d.total for d in found) <= self.device.memory_bytes

    def least_devices(self) -> tuple[int, int] | None:
        """Tensor ranks and stages of the fewest devices that would have room, fewer stages first; None where no number would."""
        layers, num_heads = attention_shapes(self.model)
        sizes = fitting_ranks(num_heads, layers[0].num_kv_heads)
        for count in range(1, MOST_DEVICES + 1):
            for ranks in sorted((n for n in sizes if count % n == 0), reverse=True):
                if count // ranks <= len(layers) and self._could_hold(count) and self._fits_on(ranks, count // ranks):
                    return ranks, count // ranks
        return None

    def _could_hold(self, count: int) -> bool:
        """Whether so many devices could hold the model at all; it spares splitting it into numbers that cannot."""
        numbers = sum(p.numel() for p in self.model.parameters())
        least = 0.5 if self.planned.quantization else self.planned.dtype.itemsize  # bytes of each
        return bool(numbers * least <= count * self.device.memory_bytes)

    def _fits_on(self, ranks: int, stages: int) -> bool:
        try:
            return self._has_room(self._bytes_of(self._cluster(ranks, stages)))
        except (ConfigError, UnsupportedModelError):  # it cannot be split so
            return False

    def traffic(self, run: Pass) -> StepTraffic:
        """Bytes that one pass sends between devices."""
        tokens = round(run.num_tokens)
        parts = [part for ranks in self.cluster.stages for part in ranks]
        gathers = [(g, p.rank) for p in parts for g in (*p.held.gathers, *p.output.gathers)]
        received = sum(g.received(rank) for g, rank in gathers)
        logits = sum(g.received(rank) for g, rank in gathers if g.for_first)
        hops = len(self.cluster.stages) * self.ranks if len(self.cluster.stages) > 1 else 0
        return StepTraffic(tokens * received, tokens * logits, tokens * hops * self.cluster.hidden * self.cluster.bytes_each)

    def speeds(self) -> Iterator[SpeedLine]:
        """By number of rows, up to `max_num_seqs`; where drafts adapt, with the number of tokens that is fastest."""
        most = self.config.max_num_seqs
        for rows in sorted({*(2**i for i in range(most.bit_length())), most}):
            plain = self.cluster.speed(rows, self.context)
            if self.spec is None:
                yield SpeedLine(plain)
                continue
            drafting, found = self.cluster.fastest(rows, self.context, self._draftings)
            yield SpeedLine(plain, drafting.drafted, drafting.emitted, found)

    @cached_property
    def _draftings(self) -> list[DraftingCost]:
        assert self.spec is not None
        most = self.spec.most_tokens
        counts = sorted({*(2**i for i in range(most.bit_length())), most}) if self.spec.is_adaptive else [most]
        return [self._drafting(count) for count in counts]

    def pays_from(self, rows: int) -> list[tuple[int, float]]:
        """Drafted tokens of a row, and tokens a step from which a draft of that size is faster than plain decoding."""
        if self.spec is None:
            return []
        plain, found, most = self.cluster.speed(rows, self.context), [], self.spec.most_tokens
        for count in sorted({*(c for c in DRAFT_SHAPES[self.spec.grows_trees] if c < most), most}):
            drafting = self._drafting(count)
            speed = self.cluster.speed(rows, self.context, drafting)
            found.append((count, SpeedLine(plain, count, drafting.emitted, speed).pays_from))
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        run = Pass(self.config.max_num_seqs, 1 + most_drafted(self.spec), self.context)
        return {
            "on_paper": True,
            "devices": [asdict(d) | {"total": d.total} for d in self.device_bytes],
            "memory_bytes": self.device.memory_bytes,
            "fits": self.fits,
            "traffic": asdict(self.traffic(run)) | {"tokens": round(run.num_tokens)},
            "speeds": [_as_dict(line) for line in self.speeds()],
            "source": self.device.source,
        }


def _as_dict(line: SpeedLine) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": line.plain.rows, "plain": asdict(line.plain)}
    if line.speculative is not None:
        found |= {"drafted": line.drafted, "tokens_per_step": line.tokens_per_step, "speculative": asdict(line.speculative)}
    return found
