"""Runs one job on OpenVINO GenAI; started by `echelon bench peers` with a Python that has openvino-genai. `openvino_worker.py JOB RESULT`

A checkpoint that is not in OpenVINO's form is converted first, which needs optimum-intel and openvino-tokenizers.
"""

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Outputs, measured, read_job, write_result  # type: ignore[import-not-found]


def converted(folder: str, dtype: str, quantization: str | None = None) -> Path:
    """The model in OpenVINO's form: as it is, or exported once into the temporary folder with its weights in the job's precision; of 4 bits
    in groups of 64, all layers.
    """
    source = Path(folder)
    if (source / "openvino_model.xml").exists():
        return source
    state = f"{source.resolve()} {(source / 'config.json').stat().st_mtime_ns} {dtype} {quantization}"
    stamp = hashlib.sha256(state.encode()).hexdigest()[:12]
    target = Path(tempfile.gettempdir()) / f"echelon-openvino-{stamp}"
    if not (target / "openvino_model.xml").exists():
        from optimum.exporters.openvino import main_export  # type: ignore[import-not-found]
        from optimum.intel import OVConfig, OVWeightQuantizationConfig  # type: ignore[import-not-found]

        weights: dict[str, dict[str, Any]] = {"int8": {"bits": 8}, "int4": {"bits": 4, "sym": True, "group_size": 64, "ratio": 1.0}}
        stored = OVConfig()  # without one, models of 1 B parameters and more are stored in 8 bits
        if quantization:
            stored = OVConfig(quantization_config=OVWeightQuantizationConfig(**weights[quantization]))
        main_export(str(source), str(target), task="text-generation-with-past", convert_tokenizer=True, ov_config=stored)
    return target


def precision() -> str:
    """Of activations, keys and values: bfloat16, or float32 where OpenVINO serves no other, as on processors with AVX2 alone."""
    import openvino  # type: ignore[import-not-found]

    return "bf16" if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"


def pipeline(job: dict[str, Any]) -> Any:
    import openvino_genai  # type: ignore[import-not-found]

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = job["batch_size"]
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False  # every round reads its prompts
    scheduler.cache_size = 4  # GB
    dtype = precision()
    properties = {"INFERENCE_NUM_THREADS": job["num_threads"], "INFERENCE_PRECISION_HINT": dtype, "KV_CACHE_PRECISION": dtype}
    if job["mode"] == "ngram":
        properties["prompt_lookup"] = True
    if job["mode"] == "draft_model":
        properties["draft_model"] = openvino_genai.draft_model(str(converted(job["draft_model"], job["dtype"])), "CPU")
    model = converted(job["model"], job["dtype"], job["quantization"])
    return openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)


def generation(job: dict[str, Any], max_tokens: int) -> Any:
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos, config.do_sample = True, False
    if job["mode"] == "ngram":
        config.num_assistant_tokens, config.max_ngram_size = job["num_ngram_tokens"], job["match_length"]
    if job["mode"] == "draft_model":
        config.num_assistant_tokens = job["num_draft_tokens"]
    return config


def kept_full(pipe: Any, prompts: list[Any], config: Any, batch_size: int) -> Outputs:
    """Never more than `batch_size` requests at once: `generate` would run all of them together, whatever `max_num_seqs` says."""
    import openvino_genai

    waiting = list(range(len(prompts)))
    running: dict[int, Any] = {}
    outputs: dict[int, list[int]] = {}
    while waiting or running:
        while waiting and len(running) < batch_size:
            place = waiting.pop(0)
            running[place] = pipe.add_request(place, prompts[place], config)
        pipe.step()
        for place, handle in list(running.items()):
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                outputs[place] = list(map(int, handle.read_all()[0].generated_ids))
                del running[place]
    return [outputs[place] for place in range(len(prompts))]


def main(given: str, taken: str) -> None:
    import numpy as np
    import openvino

    job = read_job(given)
    pipe = pipeline(job)
    prompts = [openvino.Tensor(np.array([p], np.int64)) for p in job["prompts"]]

    def generate(num_tokens: int) -> Outputs:
        return kept_full(pipe, prompts, generation(job, num_tokens), job["batch_size"])

    write_result(taken, measured(job, generate, ["openvino-genai", "openvino", "optimum-intel"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
