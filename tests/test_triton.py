"""The Triton kernels: their cases, in Triton's interpreter; and whether real compilers take them,
to what they are put, and at what cost in registers. Neither needs a GPU. `-s` prints the cost."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import yaml

triton = pytest.importorskip("triton")

HERE = pathlib.Path(__file__).parent
CASES = ["triton_cases.py", "triton_ops_cases.py", "triton_model_cases.py"]
PRODUCT = {80: r"mma\.sync\S*bf16", 90: r"wgmma\.mma_async\S*bf16", 100: r"tcgen05\.mma",
           "hip": r"v_mfma_f32_\S*bf16"}  # fmt: skip


@pytest.fixture(scope="module")
def kernels():
    """kernels.py as it is where torch is built for a GPU: with Triton."""
    spec = importlib.util.spec_from_file_location("kernels_of_gpu", HERE.parent / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", torch.version.cuda or "none")
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """{file of cases: (exit code, what it printed)}, all at once, each on one thread."""
    folder, running = tmp_path_factory.mktemp("interpreted"), {}
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    for cases in CASES:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                   str(HERE / cases)]  # fmt: skip
        out = (folder / cases).open("w")
        running[cases] = subprocess.Popen(command, cwd=HERE.parent, env=environment, stdout=out,
                                          stderr=subprocess.STDOUT)
        out.close()
    return {cases: (process.wait(), (folder / cases).read_text())
            for cases, process in running.items()}


@pytest.mark.parametrize("cases", CASES)
def test_cases_in_the_interpreter(cases, interpreted):
    code, text = interpreted[cases]
    assert code == 0, text[-8000:]


def compiled(kernels, name, arch, d=128):
    """Kernel `name` in bfloat16, as for tensors whose addresses and strides 16 divides."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = getattr(kernels, f"{name}_kernel")
    given = dict(kernels.flash_options(name, d, torch.bfloat16, arch), SCALE=d**-0.5, SOFTCAP=None)
    constants = {key: given.pop(key) for key in list(given) if key in fn.arg_names}
    types = dict.fromkeys(("q", "k", "v", "o", "do"), "*bf16")
    types |= dict.fromkeys(("lse", "delta", "dq", "dk", "dv"), "*fp32")
    types |= dict.fromkeys(("lo", "hi", "first", "last"), "*i32")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {key: types.get(key, "i32") for key in fn.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (key, kind) in enumerate(signature.items())
               if kind[0] == "*" or re.fullmatch("s[qkvo][bth]", key)}  # fmt: skip
    target = GPUTarget("hip", "gfx942", 64) if arch == "hip" else GPUTarget("cuda", arch, 32)
    return triton.compile(ASTSource(fn, signature, constants, aligned), target, given)


def usage(kernel, arch, folder):
    """-> registers, bytes of stack of a thread. These are spills: the kernels have no arrays."""
    if arch == "hip":
        text = kernel.asm["amdgcn"]
        found = (re.search(rf"\.{key}:\s+(\d+)", text)
                 for key in ("vgpr_count", "private_segment_fixed_size"))
        return [int(match[1]) for match in found]
    cuobjdump = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not cuobjdump.exists():
        return None
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [cuobjdump, "-res-usage", folder / "kernel.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK")]


EVERY = [(name, arch) for name in ("forward", "dq", "dkv") for arch in (80, 90, 100, "hip")]


@pytest.mark.parametrize("name, arch", [
    pytest.param(*c, marks=[] if c[1] == 90 or c == ("forward", "hip") else pytest.mark.full)
    for c in EVERY])
def test_compiles(name, arch, kernels, tmp_path):
    """To matrix instructions in bfloat16 alone, loads that run ahead, and without spilling; but
    dkv on 90 and 100 keeps some addresses on the stack, with which it is still the better shape."""
    kernel = compiled(kernels, name, arch)
    text = kernel.asm["amdgcn" if arch == "hip" else "ptx"]
    assert re.search(PRODUCT[arch], text)
    assert not re.search(r"mma\S*(tf32|f64)|mfma\S*(x4_?f32|x2_?f32|xf32)", text)
    assert arch == "hip" or "cp.async" in text
    shared = kernel.metadata.shared
    assert shared <= {"hip": 64, 80: 99, 90: 227, 100: 227}[arch] * 1024
    used = usage(kernel, arch, tmp_path)
    print(f"{name} {arch}: {shared} bytes shared; registers, bytes of stack: {used}")
    if used:
        assert used[1] <= (256 if name == "dkv" and arch in (90, 100) else 0)


# ---- What memory bounds

NAMES = ["rms_norm", "rms_norm_backward", "rotary", "swiglu", "swiglu_backward", "ce_local",
         "ce_grad"]  # fmt: skip
MODEL = yaml.safe_load((HERE.parent / "config.yaml").read_text())["model"]
CONFIGS = {path.stem: MODEL | yaml.safe_load(path.read_text()).get("model", {})
           for path in (HERE.parent / "configs").glob("*.yaml")}
SUMS = {"rms_norm": "r", "rms_norm_backward": "r dweight", "rotary": "cos sin",
        "ce_local": "m s hit", "ce_grad": "lse factor"}  # fmt: skip


def options(kernels, name, D, heads, d, V, softcap):
    if name.startswith("rms_norm"):
        return dict(kernels.row_options(D), **({} if name.endswith("backward") else dict(EPS=1e-5)))
    if name == "rotary":
        return dict(kernels.rotary_options(d, *heads), SIGN=1)
    loss = dict(ce_local=dict(SOFTCAP=softcap), ce_grad=dict(SOFTCAP=softcap, Z_LOSS=1e-4))
    return dict(kernels.block_options(V), **loss.get(name, {}))


def source(kernels, name, dtype="bf16", ones=(), none=(), D=4096, heads=(32, 8), d=128, V=128256,
           softcap=30.0):
    """As for tensors whose addresses and strides 16 divides -> the source and its options. What is
    1 or None (`ones`, `none`) Triton compiles in."""
    from triton.compiler import ASTSource

    fn = getattr(kernels, f"{name}_kernel")
    given = options(kernels, name, D, heads, d, V, softcap)
    constants = {key: given.pop(key) for key in list(given) if key in fn.arg_names}
    constants |= dict.fromkeys(ones, 1) | dict.fromkeys(none)
    types = dict.fromkeys(constants, "constexpr") | dict(local="*i64")
    sums = "*fp64" if dtype == "fp64" else "*fp32"
    types |= {key: sums for key in SUMS.get(name, "").split()}
    whole = re.compile("s[a-z]{1,2}|stride|n|T|H|HKV|V")
    signature = {key: types.get(key, "i32" if whole.fullmatch(key) else f"*{dtype}")
                 for key in fn.arg_names}  # fmt: skip
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values())
               if kind != "constexpr"}  # fmt: skip
    return ASTSource(fn, signature, constants, aligned), given


def compiled_op(kernels, name, arch, **sizes):
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("hip", "gfx942", 64) if arch == "hip" else GPUTarget("cuda", arch, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "6" if arch == "hip" else None)
        code, given = source(kernels, name, **sizes)
    return triton.compile(code, target, given)


@pytest.mark.parametrize("arch", [80, 90, 100, "hip"])
@pytest.mark.parametrize("name", NAMES)
def test_bounded_by_memory_compiles(name, arch, kernels, tmp_path):
    """Without spilling, to loads and stores of 16 bytes, and without atomics."""
    kernel = compiled_op(kernels, name, arch)
    text = kernel.asm["amdgcn" if arch == "hip" else "ptx"]
    wide = r"(global|buffer)_load_dwordx4" if arch == "hip" else "ld.global.v4|cp.async.cg"
    assert re.search(wide, text) and "atom" not in text
    if name == "ce_local" and arch != "hip":
        assert "cp.async" in text  # its loads run ahead
    used = usage(kernel, arch, tmp_path)
    print(f"{name} {arch}: {kernel.metadata.num_warps} warps, {kernel.metadata.shared} bytes "
          f"shared; registers, bytes of stack: {used}")
    assert used is None or used[1] == 0


@pytest.mark.parametrize("case", [
    ("rms_norm", dict(D=128)), ("rms_norm_backward", dict(D=128)),  # of the heads of a query
    ("rms_norm", dict(D=16384, none=["residual"])), ("rms_norm_backward", dict(D=8192)),
    ("rms_norm_backward", dict(D=300, none=["dh"], ones=["n"])),
    ("rotary", dict(heads=(1, 1), d=6, ones=["T", "H", "HKV", "sqh", "skt"])),
    ("rotary", dict(heads=(128, 8), d=256)),
    ("ce_local", dict(V=1, ones=["V", "stride"], softcap=None)),
    ("ce_grad", dict(V=1, ones=["V", "stride"], softcap=None)),
    *[(name, dict(dtype="fp64")) for name in NAMES]], ids=str)  # fmt: skip
def test_bounded_by_memory_compiles_at_other_sizes(case, kernels, tmp_path):
    name, sizes = case
    kernel = compiled_op(kernels, name, 90, **sizes)
    used = usage(kernel, 90, tmp_path)
    print(f"{case}: {kernel.metadata.num_warps} warps; registers, bytes of stack: {used}")
    assert used is None or used[1] == 0


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90, 100, "hip"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_compiles_at_the_sizes_of_every_config(name, arch, kernels, tmp_path):
    """Attention too, the widest head of which is 128: its products go to matrix instructions. Of
    rows of 16,384 channels the backward of rms_norm keeps some numbers on the stack."""
    m, V, softcap = CONFIGS[name], CONFIGS[name]["vocab_size"] or 50257, None
    d = m.get("d_head") or m["d_model"] // m["n_head"]
    sizes = dict(D=m["d_model"], heads=(m["n_head"], m["n_kv_head"]), d=d, V=V, softcap=softcap)
    for op in NAMES:
        used = usage(compiled_op(kernels, op, arch, **sizes), arch, tmp_path)
        most = 256 if op == "rms_norm_backward" and m["d_model"] > 8192 else 0
        assert used is None or used[1] <= most, (op, used)
    for op in ("forward", "dq", "dkv"):
        kernel = compiled(kernels, op, arch, d)
        assert re.search(PRODUCT[arch], kernel.asm["amdgcn" if arch == "hip" else "ptx"]), op
        print(f"{name} {op} {arch}: {kernel.metadata.shared} bytes shared; registers, bytes of "
              f"stack: {usage(kernel, arch, tmp_path)}")


def narrow_products(text):
    """Of TTIR: the 32-bit products of what comes from a stride, a size, or the program's number,
    unless a remainder has bounded it."""
    taint, found = {}, []
    definition = r"(%[\w#]+)(?::\d+)? = (?!scf.for)(\S+)(.*)"  # also of a loop's variable
    for line in text.splitlines():
        match = re.search(definition, line)
        if match is None:
            continue
        out, op, rest = match.groups()
        rest = rest if op[0] != "%" else op + rest
        used = re.findall(r"%[\w#]+", rest)
        of = set().union(*(taint.get(name, set()) for name in used))
        of |= {name for name in used if re.fullmatch("%(s[a-z]{1,2}|stride|n|T|H|HKV|V)", name)}
        if op == "tt.get_program_id":
            of = {"program"}
        if op == "arith.muli" and re.search(r": (tensor<.*x)?i32", rest) and of:
            found.append(line.strip())
        taint[out] = set() if op == "arith.remsi" or "cmp" in op else of
    return found


@pytest.mark.parametrize("name", NAMES)
def test_offsets_have_64_bits(name, kernels):
    """So that tensors may have 2^31 elements and more."""
    text = compiled_op(kernels, name, 90).asm["ttir"]
    assert "tt.get_program_id" in text and "arith.muli" in text and ": i64" in text
    assert narrow_products(re.sub(r" loc\(.*?\)$", "", text, flags=re.M)) == []
