"""That no kernel is compiled for the first request which needs it: the warm-up launches them all.

Triton compiles a kernel anew for other alignments and sizes, of which the interpreter knows
nothing. Here kernels are noted instead of run (``kernel_variants.Recorder``), in a process of its
own, since this one interprets them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"

TRAFFIC = """
import torch

torch.set_num_threads(1)

import runner_pairs
from msgspec.structs import replace
from runner_pairs import Setting, Tables
from tiny_models import LLAMA
from worker_steps import floats, ids, join

from zlm.kernels import attention_decode_plan
from zlm.worker import gpu_startup, layer_kinds
from zlm.worker.dummy_weights import DummyWeights
from zlm.worker.kernel_variants import Recorder, use_target

BLOCKS, TOKENS = 400, list(range(5, 45))
KINDS = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 5, "min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 1.0, "logprobs": 3, "temperature": 0.8, "top_p": 0.5},
    {"logprobs": 0},
    {"logprobs": 20},
    {"bias_ids": ids([1]), "bias_values": floats([1])},
    {"allowed_ids": ids([1, 2]), "presence_penalty": 1.0, "logprobs": 8},
    {"bad_words": [ids([1, 2])], "min_tokens": 3, "banned_until_min": ids([0])},
]
spec = replace(
    LLAMA,
    vocab_size=5000,
    hidden_size=64,
    intermediate_size=128,
    head_dim=64,
    max_position=1000,
    tie_embeddings=True,
    num_layers=4,
    layer_windows=(0, 64, 0, 64),
)
use_target(("cuda", 90, 32))
attention_decode_plan.CONFIGS["cpu"] = attention_decode_plan.CONFIGS["NVIDIA H200"]
setting = Setting(
    max_num_seqs=6,
    max_num_batched_tokens=128,
    max_model_len=1000,
    num_blocks=BLOCKS,
    dtype="bfloat16",
)
resolved = runner_pairs.resolved_for(spec, setting)
assembled = runner_pairs.assembled(resolved, DummyWeights(resolved.spec, 0), setting)
tables, runner = Tables(2), assembled.runner


def run(rows, joins=()):
    tables.next_block = tables.next_block % 200 + 1
    runner.execute(tables.message(rows, joins))


with Recorder() as recorder:
    assert len({layer_kinds.kind_of(layer) for layer in assembled.model.layers}) == 1
    with layer_kinds.one_of_each(assembled.model):
        gpu_startup.warm_up(assembled, resolved, [BLOCKS - 1] * 2, times=1)
    known = len(recorder.variants)
    assert known > 30, known
    for count in (1, 2, 3, 6):
        for kind in KINDS:
            joins = [join(slot, TOKENS[:5], **kind) for slot in range(count)]
            run([(slot, 0, 5, 1) for slot in range(count)], joins)
            run([(slot, 5, 1, 1) for slot in range(count)])
            decodes = [(slot, 6, 1, 1) for slot in range(count - 1)]
            run([*decodes, (count - 1, 0, 40, 1)], [join(count - 1, TOKENS, **kind)])
            for variant in recorder.variants[known:]:
                print(count, kind, variant.name)
            known = len(recorder.variants)
"""


def test_the_warm_up_launches_every_variant(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(SUPPORT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", TRAFFIC]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
