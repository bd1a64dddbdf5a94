"""Prompts of a dataset of Ray Data, continued by engines in actors, with results in parts: a run that ended early goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow
import ray
import ray.data
import transformers
from pydantic import ValidationError
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from echelon.config import EngineConfig
from echelon.errors import ConfigError, EchelonError, RequestError
from echelon.inputs import check_kind, first_problem, name_of, shown
from echelon.llm import LLM
from echelon.ray.parts import PATTERN, PartsFolder
from echelon.requests import Line, Request, output_line
from echelon.sampling import SamplingParams, one_each, seed_of
from echelon.speculative_config import SpeculativeConfig, speculative

BATCH = 256  # rows of a part


def generate(
    dataset: ray.data.Dataset,
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    sampling_params: SamplingParams | Mapping[str, Any] | None = None,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
    *,
    num_engines: int = 1,
    batch_size: int = BATCH,
    num_cpus: float = 1,
    num_gpus: float = 0,
    use_tqdm: bool = True,
    **engine: Any,
) -> ray.data.Dataset:
    """Continue every prompt of a dataset; what comes back are the rows of all parts in `output`, each id once.

    A row has an `id` and a `prompt`, `prompt_token_ids` or `messages`, and may have `params` of its own, as lines of `echelon generate`.
    Results have the keys of that command's output; a row that cannot be served has an `error`. A row without a seed gets one from its id,
    so the text does not depend on which engine runs it, or how often.

    A part is written when `batch_size` rows are done. Called again with the same settings and folder, after whatever end, it runs the rows
    that are in no part yet.

    Parameters
    ----------
    dataset             the prompts; they are held in Ray's object store, their ids in this process
    model               folder, which every node has, or hub name
    output              folder for the parts, which all nodes see
    sampling_params     of all rows; without, those of the model
    speculative_config  what drafts, as for `LLM`
    num_engines         actors, each with an engine that takes `num_cpus` (also its threads) and `num_gpus` of a node
    batch_size          rows that an engine is given at once; all of them are run again where it dies
    use_tqdm            show how many rows are done
    engine              settings of `LLM`

    Raises
    ------
    ConfigError   a setting cannot be, or the folder holds results with others
    RequestError  rows have no id, or two have the same
    OutputError   the folder cannot be written
    """
    check_kind("dataset", dataset, ray.data.Dataset)
    for name, value in (("num_engines", num_engines), ("batch_size", batch_size)):
        check_kind(name, value, int)
        if value < 1:
            raise ConfigError(f"{name} = {value}; give 1 or more")
    params = None if sampling_params is None else one_each(sampling_params, 1)[0].model_dump(exclude_unset=True)
    drafting = speculative(speculative_config)
    given = {
        "model": name_of(model),
        "sampling_params": params,
        "speculative_config": None if drafting is None else drafting.model_dump(exclude_unset=True),
        "engine": EngineConfig(**engine).model_dump(exclude_unset=True),
    }
    with _quiet():
        folder = PartsFolder.begin(output, given)
        done = folder.ids()
        total, blocks = _rest(dataset, done, batch_size)
        running = ray.data.from_arrow_refs(blocks).map_batches(
            EngineActor,
            fn_constructor_kwargs={"folder": folder, **given},
            batch_size=batch_size,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=num_engines),
            num_cpus=num_cpus,
            num_gpus=num_gpus,
        )
        with tqdm(total=total, initial=len(done), unit="row", disable=None if use_tqdm else True) as bar:
            for batch in running.iter_batches(batch_size=None) if blocks else ():
                bar.update(int(sum(batch["num_rows"])))
    parts = [str(part) for part in sorted(folder.path.glob(PATTERN))]
    return ray.data.read_json(parts) if parts else ray.data.from_items([])


class EngineActor:
    """One engine, in an actor of Ray Data; called with batches of rows."""

    def __init__(self, folder: PartsFolder, model: str, sampling_params: Any, speculative_config: Any, engine: dict[str, Any]) -> None:
        transformers.logging.disable_progress_bar()
        self._folder, self._params = folder, sampling_params
        self._llm = LLM(model, speculative_config, **engine)

    def __call__(self, batch: pyarrow.Table) -> dict[str, list[int]]:
        """Run a batch and write its part; how many rows it has."""
        rows = [_plain(row) for row in batch.to_pylist()]
        if rows and not self._folder.has(str(row["id"]) for row in rows):
            self._folder.write(self._results(rows))
        return {"num_rows": [len(rows)]}

    def _results(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the part says of each row, in order."""
        results: dict[int, dict[str, Any]] = {}
        accepted: list[tuple[Request, list[int], SamplingParams]] = []
        for i, row in enumerate(rows):
            try:
                accepted.append(self._request(i, row))
            except EchelonError as error:
                results[i] = {"id": str(row["id"]), "error": str(error)}
        outputs = self._llm.generate([tokens for _, tokens, _ in accepted], [params for *_, params in accepted], use_tqdm=False)
        for (request, *_), output in zip(accepted, outputs, strict=True):
            line = output_line(request, output)
            results[line.pop("index")] = line
        return [results[i] for i in range(len(rows))]

    def _request(self, index: int, row: dict[str, Any]) -> tuple[Request, list[int], SamplingParams]:
        """A row as a request, its tokens and its parameters; `RequestError` where it cannot be served."""
        try:
            request = Line.model_validate(row).request(index)
        except ValidationError as failure:
            raise RequestError(first_problem(failure, row)) from None
        default = self._llm.get_default_sampling_params() if self._params is None else SamplingParams(**self._params)
        tokens, params = request.sampled(self._llm, default.model_dump(exclude_unset=True))
        return request, tokens, params if params.seed is not None else params.model_copy(update={"seed": seed_of(request.id)})


def _rest(dataset: ray.data.Dataset, done: set[str], batch_size: int) -> tuple[int, list[ray.ObjectRef]]:
    """The number of rows, each of which has an id of its own; and those whose ids are not in `done`, in blocks of Ray's store."""
    seen: set[str] = set()
    blocks = []
    for table in dataset.iter_batches(batch_size=batch_size, batch_format="pyarrow"):
        if "id" not in table.column_names:
            raise RequestError(f"the dataset has the columns {shown(table.column_names)}; give each row an id in a column of that name")
        names = [None if name is None else str(name) for name in table["id"].to_pylist()]
        for name in names:
            if name is None or name in seen:
                raise RequestError(f"{'a row has no id' if name is None else f'two rows have the id {shown(name)}'}; give each its own")
            seen.add(name)
        rest = table.filter(pyarrow.array([name not in done for name in names], pyarrow.bool_()))
        if rest.num_rows:
            blocks.append(ray.put(rest))
    return len(seen), blocks


def _plain(value: Any) -> Any:
    """A row as a file would say it: tables have every key in every row, with nothing in those that lack it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress of Ray Data, which counts batches and operators."""
    context, log = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    before = context.enable_progress_bars, log.level
    context.enable_progress_bars = False
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        context.enable_progress_bars = before[0]
        log.setLevel(before[1])
