"""Measuring cells on a GPU, shown without one: another device, and a model of another shape than the default one.

The device is torch's ``meta``, whose tensors have a shape and no data: everything runs but the arithmetic. An operator
that is given tensors of two devices is refused, as CUDA would refuse it; numbers read from a tensor are all 1.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.measure.roofline import parameters
from minillm.model.config import config_from_hf

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
ANOTHER = {"model_type": "llama", "vocab_size": 50_000, "hidden_size": 2048, "intermediate_size": 8192,
           "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
           "max_position_embeddings": 8192}

READER = """
import json, sys
from dataclasses import replace

import nbformat, torch
import torch.fx.experimental._config as meta
from IPython.core.interactiveshell import InteractiveShell
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from minillm import llm
from minillm.course import measuring, session
from minillm.measure.bench import machine as bench
from minillm.model import shapes

path, another = sys.argv[1:]
known = shapes._shapes() | {"another": {"config": json.loads(another)}}
shapes._shapes = lambda: known
meta.meta_nonzero_assume_all_nonzero = True

class OneDevice(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        moved = "_to_copy" in str(operator)
        if not moved and len({tensor.device for tensor in tensors if tensor.dim()}) > 1:
            raise RuntimeError(f"{operator} mixes devices")
        if moved and tensors[0].is_meta and (kwargs or {}).get("device") == torch.device("cpu"):
            return torch.ones(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        return operator(*args, **(kwargs or {}))

def without_data(name, value):
    own = getattr(torch.Tensor, name)
    setattr(torch.Tensor, name, lambda self, *args, **options:
            value(self) if self.is_meta else own(self, *args, **options))

for name in ("__int__", "item"):
    without_data(name, lambda tensor: 1)
without_data("__bool__", lambda tensor: True)
without_data("tolist", lambda tensor: torch.ones(tensor.shape, dtype=torch.int64).tolist())
without_data("normal_", lambda tensor: tensor)
class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")

torch.Generator, load = Generator, llm.load_decoder
once = bench.time_repeated
bench.synchronize = lambda device: None
bench.time_repeated = lambda work, device="cpu", *_, **__: once(work, device, seconds=0, min_rounds=1, warmup=0)

random_decoder = measuring.random_decoder
measuring.random_decoder = lambda config, **options: random_decoder(replace(config, num_layers=2), **options)

def on_meta(dtype):
    return measuring.random_decoder(shapes.find_config("another"), device="meta", dtype=dtype)

llm.load_decoder = lambda path, *, dtype, device, quantization: (
    load(path, dtype=dtype, device=device) if device == "cpu" else on_meta(dtype))
session.Session.measure_device, session.Session.measure_shape = "meta", "another"
session.Session.measure_model = lambda self, model: on_meta(str(model.dtype).removeprefix("torch."))
session.Session.card_with_kernels = lambda self, *dtypes: self.card()
values = {}

def measured(name, work):
    with OneDevice():
        return values.setdefault(name, work())

session.measured = measured
shell = InteractiveShell.instance()
cells = nbformat.read(path, as_version=4).cells
last = max(place for place, cell in enumerate(cells) if "measure" in cell.metadata.get("tags", []))
for cell in cells[:last + 1]:
    if cell.cell_type == "code":
        shell.run_cell(cell.source).raise_error()
print("\\nVALUES " + json.dumps(values))
"""

C = config_from_hf(ANOTHER)
P = parameters(C)
HEAD, PAIR = C.vocab_size * C.hidden_size, 4 * C.num_heads * C.head_dim
LAYER = (P["qkv"] + P["output"] + P["mlp"]) // C.num_layers
BODY = LAYER * C.num_layers + P["norms"]
CLAIMS = {  # by notebook: what its runs must say of the model that was measured
    "02": lambda runs: runs["attention"]["flops_a_pair"] == PAIR,
    "03": lambda runs: runs["parts"]["model"] == "another",
    "04": lambda runs: (runs["growth"]["weights"], runs["growth"]["head"]) == (BODY + HEAD, HEAD),
    "05": lambda runs: (runs["ttft"]["shape"] == {"body": BODY, "head": HEAD, "pair_flops": PAIR * C.num_layers}
                        and runs["crossing"]["flops"][4] == [PAIR * (T := 4 * LAYER // PAIR) * (T + 1) / 2,
                                                             2 * LAYER * T]),
    "06": lambda runs: (runs["cache"]["weight_bytes"] == 4 * (BODY + HEAD)
                        and runs["cache"]["token_bytes"] == 2 * C.num_layers * C.num_kv_heads * C.head_dim * 4),
    "07": lambda runs: runs["widths"]["points"]["float32"][-1][0] > 9 * 12.6e6,  # three times the default widths
    "08": lambda runs: runs["grid"]["model"] == "another" and len(runs["grid"]["rung_s"]) == 2,
    "09": lambda runs: len(runs["harness"]["at once"]) == 8,
}


@pytest.mark.parametrize("number", CLAIMS)
def test_a_notebook_measures_another_model_on_another_device(number, reader_home):
    """All cells up to the last that measures run, each timing once, figures included; no operator meets two devices."""
    path = next(NOTEBOOKS.glob(f"{number}_*.ipynb"))
    reader = {"MINILLM_LIVE": "1", "MINILLM_HOME": str(reader_home), "MINILLM_RECORD": "", "MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, "-c", READER, path, json.dumps(ANOTHER)], cwd=NOTEBOOKS, text=True,
                          capture_output=True, timeout=300, env=os.environ | reader)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert CLAIMS[number](json.loads(done.stdout.rpartition("VALUES ")[2])), done.stdout[-2000:]
