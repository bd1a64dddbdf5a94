"""From settings to a target in several ranks: those that this process starts, or those that were started with it."""

from __future__ import annotations

from echelon.checkpoint.digest import checkpoint_digest
from echelon.errors import ConfigError
from echelon.model.load.loading import LoadedModel, check_ranks
from echelon.ops import compiled, devices
from echelon.parallel.children import ChildRanks, check_machine
from echelon.parallel.group import RankGroup
from echelon.parallel.joined import JoinedRanks, serve_summoned, summons_for
from echelon.parallel.rank_memory import MOST_RANKS
from echelon.parallel.splits import SPLITS, STAGES


def load_in_ranks(name: str, setting: str, size: int, dtype: str, device: str, quantization: str | None) -> tuple[LoadedModel, RankGroup]:
    """Rank 0's part of a checkpoint that is split as `setting` has it, and the workers that have the others. In a process that was started
    as one of the workers this does not return: it serves until rank 0 is done, and then ends the process.

    Raises
    ------
    ConfigError                            this machine or model cannot be split so
    ModelLoadError, UnsupportedModelError  as of `load_model`
    RankError                              a rank has ended, or hangs
    SystemExit                             this process was a worker, and is done
    """
    asked = f"{setting} = {size}"
    summons = summons_for(asked, size)
    _check_ranks(asked, size, device)
    if summons is not None and summons.rank:
        serve_summoned(setting, summons)
        raise SystemExit(0)
    check_ranks(name, size, setting == STAGES)
    part: dict[str, object] = {"model": name, "dtype": dtype, "quantization": quantization, "split": setting, "isa": compiled.isa()}
    group: RankGroup
    if summons is None:
        check_machine(asked)
        group = children = ChildRanks(setting, size)
        part["threads"] = children.num_threads
    else:
        part["digest"] = checkpoint_digest(name)
        group = JoinedRanks(setting, summons)
    try:
        group.tell(part)
        loaded = SPLITS[setting].load(group.memory, name, dtype, quantization)
        group.answers()
    except BaseException:
        group.close()
        raise
    return loaded, group


def serve_if_summoned(sizes: dict[str, int]) -> None:
    """Where this process was started as a worker of the ranks that `sizes` asks for, by setting, be that and then end the process."""
    for setting, size in sizes.items():
        if size > 1 and (summons := summons_for(f"{setting} = {size}", size)) is not None and summons.rank:
            _check_ranks(f"{setting} = {size}", size, "cpu")
            serve_summoned(setting, summons)
            raise SystemExit(0)


def _check_ranks(asked: str, size: int, device: str) -> None:
    if size > MOST_RANKS:
        raise ConfigError(f"{asked} is more than the {MOST_RANKS} ranks that are served; lower it")
    if devices.chosen_device(device).type != "cpu":
        raise ConfigError(f"{asked} is served on CPUs, and has not been run on GPUs; use device = 'cpu', or leave it out")
    compiled.check_built(asked)
