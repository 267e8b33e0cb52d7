"""The whole model through the Triton kernels, in the interpreter or on tensors without values.
test_triton.py runs this file in a process of its own with TRITON_INTERPRET=1."""

import math

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.version.cuda = torch.version.cuda or "none"  # kernels.py loads Triton for a GPU's torch only
import parity  # noqa: E402

import data  # noqa: E402
import model  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside dynamo
@pytest.mark.parametrize("compiled", [False, True])
def test_the_model_trains_through_them(compiled, tmp_path):
    """The same loss, gradients and weights as through PyTorch; compiled, a layer is one graph that
    has them all."""
    data.synth(tmp_path, tokens=3000, vocab=51, docs=400, seed=1)
    case = {"model.n_layer": 2, "model.qk_norm": True, "model.logit_softcap": 5.0, "rounds": 1,
            "train.global_batch": 2, "train.microbatch": 2, "speed.loss_chunk": 9,
            "data.mask_documents": True}
    runs, seen = [], set()
    for how in ("torch", "triton"):
        run = parity.prepare(case | {"speed.kernels": how}, tmp_path)
        if compiled and how == "triton":
            run.fns = compiled_functions(run, seen)
        runs.append(parity.go(run, 1))
        run.loader.close()
    assert parity.compare(*runs) is None
    assert not compiled or seen >= {"rms_norm_forward", "rms_norm_backward", "rotary_forward",
                                    "swiglu_forward", "swiglu_backward", "flash_forward",
                                    "flash_backward"}


def compiled_functions(run, seen):
    """run.fns, compiled; in `seen` come the names of this project's operators in the graphs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def note(graph, inputs):
        seen.update(node.target._schema.name.split("::")[1] for node in graph.graph.nodes
                    if str(node.target).startswith("minimesh"))
        return make_boxed_func(graph.forward)

    forward = torch.compile(model.Layer.forward, dynamic=False, fullgraph=True,
                            backend=aot_autograd(fw_compiler=note, bw_compiler=note))
    run.model.functions(compiled=True)
    layers = [lambda x, micro, later, layer=layer: forward(layer, x, micro)
              for layer in run.model.layers.values()]
    return [run.model.embed, *layers, run.model.head]


STEPS = [{"data.mask_documents": True}, {"speed.dtype": "float16"}, {"parallel.tp": 2},
         {"parallel.dp": 1, "parallel.fsdp": 2, "parallel.zero": 3}, {"parallel.pp": 2},
         {"parallel.cp": 2, "data.mask_documents": True},
         {"parallel.cp": 2, "parallel.cp_mode": "ulysses"}]  # fmt: skip


@pytest.mark.parametrize("extra, how", [
    *[(extra, "triton") for extra in STEPS], ({}, "torch"), (STEPS[2], "torch")], ids=str)
def test_a_step_reads_no_value(extra, how, tmp_path):
    """A whole step of train.py on tensors that have no values, as a rank of a world that is not
    there: whoever asked for one, as a host that waits for its GPU does, would raise."""
    data.synth(tmp_path, tokens=3000, vocab=51, docs=400, seed=1)
    ranks = math.prod(n for key, n in extra.items() if key[:9] == "parallel." and n == 2)
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    case = {"speed.dtype": "bfloat16", "speed.kernels": how, "data.path": str(tmp_path)} | extra
    config = parity.config_of(case)
    mesh = parallel.build_mesh(train.check_config(config, ranks), "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        run = train.build(config, mesh)
        batches = run.loader.step(0)
        out = train.train_step(run, batches, sum(b.n_valid for b in batches))
        assert out.shape == (4,)
    if ranks > 1:
        dist.destroy_process_group()
