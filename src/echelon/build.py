"""From configuration to engine, in one pass: models, drafter, storage, scheduler."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from typing import TYPE_CHECKING

from echelon.acceptance import Exact, Rejection, Rule, Typical
from echelon.adaptive.controller import BatchController, Controller
from echelon.adaptive.cost_table import CostTable
from echelon.adaptive.lanes import LaneController
from echelon.adaptive.row_controller import RowController
from echelon.baselines.strategies import STRATEGIES
from echelon.config import EngineConfig
from echelon.drafters.acceptance_watch import AcceptanceWatch
from echelon.drafters.base import Drafter, LevelDrafter, NoDrafter
from echelon.drafters.draft_model import DraftModelDrafter
from echelon.drafters.guard import GuardedDrafter
from echelon.drafters.head_selftest import warn_of_chance
from echelon.drafters.heads import AttachedHead, HeadDrafter, attach_head, head_for
from echelon.drafters.ngram import NgramDrafter
from echelon.engine import Engine
from echelon.engine_costs import costs_of, model_key, usage_of
from echelon.errors import ConfigError, ModelLoadError
from echelon.heads.base import Head
from echelon.inputs import check_kind, dtype_name, name_of, shown
from echelon.memory.ladder import Fitting
from echelon.memory.residents import PlannedModels
from echelon.methods import METHODS, Can
from echelon.model.load.loading import LoadedModel, check_vocabularies, load_model
from echelon.model.load.sharing import share_weights
from echelon.model.patches.packing import check_integers
from echelon.ops import compiled, devices
from echelon.parallel.group import RankGroup
from echelon.parallel.runner import split_storage
from echelon.parallel.splits import STAGES, TENSOR
from echelon.parallel.starting import load_in_ranks
from echelon.prefix_cache import PrefixCache
from echelon.release import version
from echelon.scheduler import LONGEST_PATH, NO_DRAFTS, DraftLimits, Scheduler
from echelon.sequence import Sequence
from echelon.sizes import gibibytes
from echelon.speculative_config import OWN_COPY, SpeculativeConfig
from echelon.stats import Stats
from echelon.step_costs import PieceSizes
from echelon.storage import Storage
from echelon.trees import Growth, StaticTree, chain

if TYPE_CHECKING:
    from echelon.model.graphs.ahead import Ahead

logger = logging.getLogger("echelon")

NUM_AHEAD = 5  # drafted tokens of a row where a device drafts without the host, unless told otherwise


def build(
    config: EngineConfig,
    spec: SpeculativeConfig | None,
    model: str | os.PathLike[str] | LoadedModel,
    draft_model: LoadedModel | None = None,
    draft_head: Head | None = None,
) -> tuple[Engine, Storage, int]:
    """Load what is not loaded already, size the KV pool and make the engine; see `LLM` for the arguments. Engine, storage (whose first
    runner is the target's), and the longest text in tokens, prompt included.

    Raises
    ------
    ConfigError, ModelLoadError, UnsupportedModelError
    """
    if draft_head is not None:
        check_kind("draft_head", draft_head, Head)
    if config.num_ranks == 1:
        target = _loaded(config, model, config.device, "model", config.quantization)
        with devices.current(target.device):
            return _built(config, spec, target, draft_model, draft_head, None)
    target, ranks = _loaded_in_ranks(config, model)
    try:
        return _built(config, spec, target, draft_model, draft_head, ranks)
    except BaseException:
        ranks.close()
        raise


def _built(
    config: EngineConfig,
    spec: SpeculativeConfig | None,
    target: LoadedModel,
    draft_model: LoadedModel | None,
    draft_head: Head | None,
    ranks: RankGroup | None,
) -> tuple[Engine, Storage, int]:
    """The rest of `build`, on a target that is loaded, and split among `ranks` where there are several."""
    if target.device.type == "cpu":
        compiled.warn_once_if_missing()
    if config.kv_cache_dtype != "auto":
        check_integers(f"kv_cache_dtype = {config.kv_cache_dtype!r}", "leave it out there", target.device)
    spec = _suited(config, spec, target)
    draft = _draft_model(config, spec, target, draft_model)
    head = _head(spec, target, draft_head, is_tested=ranks is None)
    max_len = config.model_len(target.max_len)
    models = [target] if draft is None else [target, draft]
    storage = STRATEGIES[config.strategy](config, models, max_len, spec, head)
    if ranks is not None:
        storage = split_storage(storage, ranks)
    logger.info("%s", storage.plan)
    return _engine(config, spec, storage), storage, max_len


def fit_to_memory(
    config: EngineConfig,
    spec: SpeculativeConfig | None,
    model: str | os.PathLike[str] | LoadedModel,
    draft_model: LoadedModel | None = None,
    draft_head: Head | None = None,
) -> Fitting | None:
    """Settings that fit the budget of `config`; None where it names none. No weight is read for it.

    Raises
    ------
    ConfigError  nothing fits, or so much is not free
    """
    if config.memory is None and config.gpu_memory_utilization is None:
        return None
    models = PlannedModels(config, spec, model, draft_model, draft_head)
    fitting = models.fitted(config.budget(models.memory) or 0)
    planned, free = fitting.plan.total_bytes, models.within_reach
    if planned > free:
        name = "memory" if config.memory is not None else "gpu_memory_utilization"
        raise ConfigError(
            f"{name} = {shown(getattr(config, name))} plans {gibibytes(planned)}, and {gibibytes(free)} are free on {models.device.type}; "
            "lower it, or end what else is running"
        )
    for line in fitting.lines():
        logger.info("%s", line)
    return fitting


def _suited(config: EngineConfig, spec: SpeculativeConfig | None, target: LoadedModel) -> SpeculativeConfig | None:
    """Where nothing says how much is drafted, and a device could draft alone, drafts have a length that lets it."""
    says = {"num_speculative_tokens", "max_speculative_tokens", "cost_table"}
    if spec is None or target.device.type == "cpu" or config.enforce_eager or spec.model_fields_set & says or not _is_drafted_there(spec):
        return spec
    return spec.model_copy(update={"num_speculative_tokens": NUM_AHEAD})


def _is_drafted_there(spec: SpeculativeConfig) -> bool:
    """Whether a device can draft without the host, as far as the settings of what drafts go."""
    is_chain = Can.RUN_AHEAD in METHODS[spec.method].can and not spec.grows_trees
    return is_chain and spec.min_score == -math.inf and spec.acceptance == "exact"


def _loaded(
    config: EngineConfig, model: str | os.PathLike[str] | LoadedModel, device: str, field: str, quantization: str | None
) -> LoadedModel:
    """The model on `device`; one that is loaded already stays as it is, and must be what is asked for."""
    if not isinstance(model, LoadedModel):
        name = name_of(model, field)
        return load_model(name, dtype=config.dtype, device=device, numerics=config.numerics, quantization=quantization)
    if quantization not in (None, model.quantization):
        how = f"with quantization = {model.quantization!r}" if model.quantization else "without quantization"
        raise ConfigError(f"{model.name!r} was loaded {how}, and {quantization!r} is wanted; load it so")
    if model.is_fast and config.numerics == "invariant":
        raise ConfigError(f"{model.name!r} was loaded with numerics = 'fast', and 'invariant' is wanted; load it so, or ask for 'fast'")
    if device not in ("auto", model.device.type):
        raise ConfigError(f"{model.name!r} is on {model.device}, and device = {device!r} is wanted; load it there")
    return model


def _loaded_in_ranks(config: EngineConfig, model: str | os.PathLike[str] | LoadedModel) -> tuple[LoadedModel, RankGroup]:
    """The target, split among the processes that the configuration asks for."""
    setting, size = TENSOR if config.tensor_parallel_size > 1 else STAGES, config.num_ranks
    if isinstance(model, LoadedModel):
        raise ConfigError(
            f"{setting} = {size} splits a model as it is read, and {model.name!r} is loaded already; give its folder or hub name"
        )
    return load_in_ranks(name_of(model, "model"), setting, size, config.dtype, config.device, config.quantization)


def _draft_model(
    config: EngineConfig, spec: SpeculativeConfig | None, target: LoadedModel, loaded: LoadedModel | None
) -> LoadedModel | None:
    if spec is None or METHODS[spec.method].needs != "model":
        return None
    source = spec.named_model() if loaded is None else loaded
    if loaded is None and spec.own_copy is not None:
        return _own_copy(config, target, spec.own_copy)
    draft = _loaded(config, source, target.device.type, "draft_model", spec.quantization)
    check_vocabularies(target, draft)
    return draft


def _own_copy(config: EngineConfig, target: LoadedModel, quantization: str) -> LoadedModel:
    """The target in fewer bits, read again; embedding and output layer are kept once where they are the same."""
    asked = f"model = '{OWN_COPY}{quantization}'"
    if target.quantization == quantization:
        raise ConfigError(f"{asked} is what {target.name!r} is itself, and would draft no faster; leave it out, or draft in fewer bits")
    dtype = dtype_name(target.model.dtype)
    try:
        draft = load_model(target.name, dtype=dtype, device=target.device.type, numerics=config.numerics, quantization=quantization)
    except (ConfigError, ModelLoadError) as error:
        raise ConfigError(f"{asked} reads the target's checkpoint again, and that fails ({error}); give another draft model") from error
    check_vocabularies(target, draft)
    share_weights(target, draft)
    return draft


def _head(spec: SpeculativeConfig | None, target: LoadedModel, loaded: Head | None, is_tested: bool) -> AttachedHead | None:
    """What is to draft; it is tested on a target that this process has all of."""
    head = head_for(spec, target, loaded)
    if head is None:
        return None
    attached = attach_head(head, target)
    if is_tested:
        warn_of_chance(target, head, attached.reader, attached.shapes)
    return attached


def _engine(config: EngineConfig, spec: SpeculativeConfig | None, storage: Storage) -> Engine:
    """The first runner of `storage` is the target's, the second a draft model's; a drafter stands behind its guard."""
    target, ahead = storage.runners[0], _ahead(spec, storage)
    if spec is None:
        return Engine(target, NoDrafter(), _scheduler(config, spec, storage), ahead=ahead)
    drafter: Drafter = METHODS[spec.method].build(config, spec, storage)
    costs = costs_of(config, spec, storage, drafter) if spec.is_adaptive else None
    controller = _controller(spec, costs, drafter, config.pipeline_parallel_size > 1) if costs is not None else None
    scheduler = _scheduler(config, spec, storage, controller.piece_sizes if controller is not None else None)
    guard = GuardedDrafter(drafter, target.loaded.vocab_size, spec.grows_trees)
    stats = Stats(target=target.usage, draft=usage_of(drafter), drafter_faults=guard.faults)
    engine = Engine(target, guard, scheduler, _rule(spec), ahead, stats, controller)
    engine.observers.append(AcceptanceWatch(spec.method, stats).observe)
    return engine


def _controller(spec: SpeculativeConfig, costs: CostTable, drafter: Drafter, has_lanes: bool) -> Controller:
    """Ranks drafted tokens across rows where no text depends on it, across those of a step where several are under way; elsewhere each
    row's past decides alone.
    """
    if spec.acceptance != "exact":
        return RowController(costs, spec.longest_path, spec.most_tokens / spec.longest_path)
    kind = LaneController if has_lanes else BatchController
    controller = kind(costs, corrects=spec.cost_table is None)
    if isinstance(drafter, LevelDrafter):
        drafter.pace = controller.goes_on
    return controller


def _ahead(spec: SpeculativeConfig | None, storage: Storage) -> Ahead | None:
    """Steps are launched early where the device decides alone what is drafted and kept, and no text changes its keys as it grows."""
    runners = storage.runners
    if any(r.captured is None or r.loaded.original_context is not None for r in runners):
        return None
    if spec is not None and (spec.is_adaptive or not _is_drafted_there(spec)):
        return None
    from echelon.model.graphs.ahead import Ahead  # imports Triton

    return Ahead(runners[0], runners[1] if len(runners) > 1 else None)


def _draft_limits(spec: SpeculativeConfig | None, storage: Storage) -> DraftLimits:
    """How much may be drafted for a row, as far as what drafts can."""
    if spec is None:
        return NO_DRAFTS
    deepest = None if storage.head is None else storage.head.head.max_depth
    context = storage.runners[1].loaded.max_len if len(storage.runners) > 1 else None
    longest = min(spec.longest_path, LONGEST_PATH if deepest is None else deepest)
    return DraftLimits(spec.most_tokens, longest, spec.grows_trees, context, spec.acceptance == "exact")


def _prefix_cache(config: EngineConfig, storage: Storage) -> PrefixCache | None:
    """What is kept of texts in the caches of target and drafter, by all that decides the bits of keys and values."""
    if not storage.cached_tables:
        return None
    models = [runner.loaded for runner in storage.runners]
    contexts = [m.original_context for m in models if m.original_context is not None]
    fixed = [version(), str(models[0].device), config.numerics, *map(model_key, models)]

    def root(sequence: Sequence) -> bytes:
        switches = [(len(sequence) if c.is_read_anew else sequence.num_prompt_tokens) > c.length for c in contexts]
        return hashlib.sha256(repr((fixed, compiled.is_built() and compiled.isa(), switches, sequence.salt)).encode()).digest()

    return PrefixCache(storage.cached_tables, root)


def _scheduler(config: EngineConfig, spec: SpeculativeConfig | None, storage: Storage, piece_sizes: PieceSizes | None = None) -> Scheduler:
    contexts = [r.loaded.original_context for r in storage.runners if r.loaded.original_context is not None]
    return Scheduler(
        storage.tables,
        min(config.num_rows_held, storage.most_rows or config.num_rows_held),
        config.max_num_batched_tokens,
        _draft_limits(spec, storage),
        context_switches=[context.length for context in contexts if context.is_read_anew],
        selector=storage.selector,
        refill=config.refill,
        piece_sizes=piece_sizes,
        prefix_cache=_prefix_cache(config, storage),
    )


def ngram_drafter(_config: EngineConfig, spec: SpeculativeConfig, _storage: Storage) -> Drafter:
    """Build the drafter that copies from the text."""
    return NgramDrafter(spec)


def draft_model_drafter(config: EngineConfig, spec: SpeculativeConfig, storage: Storage) -> Drafter:
    """Build the drafter that runs a small model."""
    target, draft = storage.runners
    keeps_probs = spec.acceptance == "rejection"
    growth = growth_of(spec, None) if spec.grows_trees else None
    has_scores = spec.is_adaptive and spec.acceptance == "exact"
    return DraftModelDrafter(
        draft, config.max_num_batched_tokens, target.loaded.vocab_size, keeps_probs, spec.min_score, growth, has_scores
    )


def head_drafter(_config: EngineConfig, spec: SpeculativeConfig, storage: Storage) -> Drafter:
    """Build the drafter that runs a head of the target."""
    assert storage.head is not None
    growth, drafts_first = growth_of(spec, storage.head.head.max_depth), spec.acceptance == "exact"
    return HeadDrafter(storage.head, growth, storage.head_cache, spec.min_score, drafts_first)


def growth_of(spec: SpeculativeConfig, max_depth: int | None) -> Growth:
    """How the configured chains or trees grow, no path longer than `max_depth`.

    Raises
    ------
    ConfigError  the configured paths are no tree
    """
    count, method = spec.most_tokens, METHODS[spec.method]
    longest, only_ranks = LONGEST_PATH if max_depth is None else max_depth, not (spec.confidence_threshold or spec.is_adaptive)
    if spec.tree == "chain":
        return chain(min(count, longest), only_ranks)
    if spec.tree == "dynamic":
        return method.dynamic(spec.tree_top_k, spec.tree_top_p, min(spec.tree_depth, longest))
    try:
        return StaticTree([p for p in spec.paths if len(p) <= longest], only_ranks)
    except ValueError as error:
        raise ConfigError(f"speculative_token_tree: {error}") from error


def _rule(spec: SpeculativeConfig) -> Rule:
    if spec.acceptance != "typical":
        return Rejection() if spec.acceptance == "rejection" else Exact()
    logger.warning("acceptance 'typical' is LOSSY: above temperature 0 the text is not distributed as the target's own")
    return Typical(spec.posterior_threshold, spec.posterior_alpha)
