"""Who is compared. Every contestant is tuned (its fastest way to run packed documents), then checked, then timed."""

import dataclasses
import functools
import json
import subprocess
import sys
import time

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as functional

import figures

TUNING_CALLS = 3
# Linux counts what a process was before exec into its peak: this one, with torch in it, is no parent for a measurement.
PEAK_OF_CHILD = """
import os, sys
quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=quiet)
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
OUTPUTS = {"forward": ["o"], "forward+backward": ["o", "dq", "dk", "dv"]}


@dataclasses.dataclass
class Shape:
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    lengths: list


def milliseconds(call, repeats, warmup):
    samples = []
    for turn in range(-warmup, repeats):
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        if turn >= 0:
            samples.append(1000 * elapsed)
    return samples


def fastest(ways):
    """(name, way) of the least time, and the times of all."""
    times = {name: min(milliseconds(way.call, TUNING_CALLS, 1)) for name, way in ways.items()}
    name = min(times, key=times.get)
    return name, ways[name], times


class Data:
    """q, k, v, do [tokens, heads, head_dim] of normal numbers that BF16 holds exactly: all peers get the same."""

    def __init__(self, shape, seed):
        generator = torch.Generator().manual_seed(seed)

        def normal(heads):
            values = torch.randn(shape.tokens, heads, shape.head_dim, generator=generator)
            return values.to(torch.bfloat16).float()

        self.shape = shape
        self.q, self.do = normal(shape.heads), normal(shape.heads)
        self.k, self.v = normal(shape.kv_heads), normal(shape.kv_heads)
        self.truths = {}

    def documents(self, tensor):
        return tensor.split(self.shape.lengths)

    def truth(self, kv_head):
        """Float64, written out, of one key/value head and its query heads, in all documents."""
        if kv_head not in self.truths:
            group = self.shape.heads // self.shape.kv_heads
            heads = slice(kv_head * group, (kv_head + 1) * group)
            parts = [
                float64_attention(q[:, heads], k[:, kv_head], v[:, kv_head], do[:, heads])
                for q, k, v, do in zip(*map(self.documents, (self.q, self.k, self.v, self.do)), strict=True)
            ]
            self.truths[kv_head] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return self.truths[kv_head]


def float64_attention(q, k, v, do):
    """One document: q, do [T, group, D], k, v [T, D]; causal, with gradients by the textbook's formulas."""
    k, v = k.double(), v.double()
    scale = k.shape[1] ** -0.5
    hidden = torch.ones(k.shape[0], k.shape[0], dtype=torch.bool).triu(1)
    results = {"o": [], "dq": []}
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for head in range(q.shape[1]):
        q_head, do_head = q[:, head].double(), do[:, head].double()
        p = (q_head @ k.T).mul_(scale).masked_fill_(hidden, -torch.inf).softmax(1)
        o = p @ v
        ds = (do_head @ v.T).sub_((do_head * o).sum(1, keepdim=True)).mul_(p).mul_(scale)
        dk += ds.T @ q_head
        dv += p.T @ do_head
        results["o"].append(o)
        results["dq"].append(ds @ k)
    return {name: torch.stack(heads, 1) for name, heads in results.items()} | {"dk": dk[:, None], "dv": dv[:, None]}


def compare(got, data, kv_heads, limit):
    """Worst relative L2 and absolute errors of outputs [tokens, heads, D] over some key/value heads."""
    group = data.shape.heads // data.shape.kv_heads
    result = {"kv_heads_checked": kv_heads, "of": data.shape.kv_heads, "relative_l2_limit": limit, "accuracy": {}}
    for name, tensor in got.items():
        errors = []
        for kv_head in kv_heads:
            width = group if name in ("o", "dq") else 1
            want = data.truth(kv_head)[name]
            difference = tensor[:, kv_head * width : (kv_head + 1) * width].double() - want
            errors.append(((difference.norm() / want.norm()).item(), difference.abs().max().item()))
        result["accuracy"][name] = {"relative_l2": max(e[0] for e in errors), "max_abs": max(e[1] for e in errors)}
    # A NaN is below no limit.
    result["right"] = all(entry["relative_l2"] <= limit for entry in result["accuracy"].values())
    return result


class Way:
    """One way to run all documents: `call` is timed, `outputs` are those of a call, as [tokens, heads, D], and `keep`
    is what has to live as long."""

    def __init__(self, call, outputs, keep=None):
        self.call = call
        self.outputs = outputs
        self.keep = keep


def unpack(groups, results, lengths):
    """[batch, T, heads, D] of each group of documents to [tokens, heads, D]."""
    documents = [None] * len(lengths)
    for group, result in zip(groups, results, strict=True):
        for index, document in zip(group, result, strict=True):
            documents[index] = document
    return torch.cat(documents)


class Torch:
    """scaled_dot_product_attention. Packed documents: one call a document, or a batch of those of equal length, or one
    call with a dense mask; memory in the order of heads or of tokens; whichever is fastest."""

    def __init__(self, dtype, threads):
        torch.set_num_threads(threads)
        self.dtype = dtype
        self.name = "torch SDPA " + {torch.float32: "FP32", torch.bfloat16: "BF16"}[dtype]
        self.ceiling = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
        # BF16: four times its unit roundoff; dk and dv come close to two (6.5e-3 at 4096 tokens). FP32: what sums of
        # thousands of terms may lose.
        self.limit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}[dtype]
        self.ways = {}
        self.tuning = {}

    def prepare(self, data, phases):
        for phase in phases:
            ways = {
                f"{plan}, {layout}{', k and v repeated' if repeat else ''}": self.way(
                    data, phase, groups, layout, repeat
                )
                for plan, groups in self.plans(data.shape.lengths).items()
                for layout in ("head-major", "token-major")
                for repeat in ((False, True) if data.shape.heads != data.shape.kv_heads else (False,))
            }
            name, way, times = fastest(ways)
            self.ways[phase] = way
            self.tuning[phase] = {"chosen": name, "ms": times}

    @staticmethod
    def plans(lengths):
        plans = {"one call a document" if len(lengths) > 1 else "one call": [[i] for i in range(len(lengths))]}
        batched = figures.groups_by_length(lengths)
        if len(batched) < len(lengths):
            plans["batches of equal length"] = batched
        if len(lengths) > 1:
            plans["one call, dense mask"] = None
        return plans

    def way(self, data, phase, groups, layout, repeat):
        lengths = data.shape.lengths
        mask = None
        if groups is None:
            document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            mask = (document[:, None] == document[None]).tril()

        def arrange(tensor):
            documents = [tensor] if groups is None else data.documents(tensor)
            stacks = [torch.stack([documents[i] for i in group]) for group in (groups or [[0]])]
            if layout == "head-major":
                return [stack.transpose(1, 2).to(self.dtype).contiguous() for stack in stacks]
            return [stack.to(self.dtype).transpose(1, 2) for stack in stacks]

        inputs = list(zip(*map(arrange, (data.q, data.k, data.v, data.do)), strict=True))
        ratio = data.shape.heads // data.shape.kv_heads

        def attention(q, k, v):
            if repeat:
                k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
            return functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=ratio > 1 and not repeat
            )

        def forward():
            with torch.inference_mode():
                return [(attention(q, k, v),) for q, k, v, _ in inputs]

        def both():
            results = []
            for q, k, v, do in inputs:
                leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
                o = attention(*leaves)
                results.append((o.detach(), *torch.autograd.grad(o, leaves, do)))
            return results

        call = forward if phase == "forward" else both

        def outputs():
            names = OUTPUTS[phase]
            columns = zip(*call(), strict=True)
            stacks = [[result.transpose(1, 2).float() for result in column] for column in columns]
            if groups is None:
                return {name: stack[0][0] for name, stack in zip(names, stacks, strict=True)}
            return {name: unpack(groups, stack, lengths) for name, stack in zip(names, stacks, strict=True)}

        return Way(call, outputs)

    def check(self, data, kv_heads):
        return {phase: compare(way.outputs(), data, kv_heads, self.limit) for phase, way in self.ways.items()}

    def sample(self, repeats):
        return {phase: milliseconds(way.call, repeats, 1) for phase, way in self.ways.items()}


class OnnxRuntime:
    """The operator GroupQueryAttention, which is causal; without a past, as for a prompt. It also writes k and v in the
    order of heads, its cache. No backward."""

    name = "onnxruntime GQA FP32"
    ceiling = "fp32"
    limit = 1e-5

    def __init__(self, threads):
        self.threads = threads
        self.ways = {}
        self.tuning = {}

    def session(self, shape):
        helper, kind = onnx.helper, onnx.TensorProto
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        cache = ["batch", shape.kv_heads, "past", shape.head_dim]
        node = helper.make_node(
            "GroupQueryAttention",
            ["q", "k", "v", "", "", "seqlens_k", "total"],
            ["o", "present_k", "present_v"],
            domain="com.microsoft",
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
        )
        inputs = {
            "q": (kind.FLOAT, ["batch", "tokens", width]),
            "k": (kind.FLOAT, ["batch", "tokens", kv_width]),
            "v": (kind.FLOAT, ["batch", "tokens", kv_width]),
            "seqlens_k": (kind.INT32, ["batch"]),
            "total": (kind.INT32, []),
        }
        outputs = {"o": ["batch", "tokens", width], "present_k": cache, "present_v": cache}
        graph = helper.make_graph(
            [node],
            "attention",
            [helper.make_tensor_value_info(name, *info) for name, info in inputs.items()],
            [helper.make_tensor_value_info(name, kind.FLOAT, dims) for name, dims in outputs.items()],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def prepare(self, data, phases):
        del phases
        session = self.session(data.shape)
        lengths = data.shape.lengths
        plans = {"one call a document" if len(lengths) > 1 else "one call": [[i] for i in range(len(lengths))]}
        batched = figures.groups_by_length(lengths)
        if len(batched) < len(lengths):
            plans["batches of equal length"] = batched
        ways = {name: self.way(session, data, groups) for name, groups in plans.items()}
        name, way, times = fastest(ways)
        self.ways["forward"] = way
        self.tuning["forward"] = {"chosen": name, "ms": times}

    @staticmethod
    def way(session, data, groups):
        shape = data.shape
        bindings = []
        values = []  # A binding does not keep alive what it reads.

        def bind(binding, name, array):
            values.append(onnxruntime.OrtValue.ortvalue_from_numpy(array))
            binding.bind_ortvalue_input(name, values[-1])

        tensors = {"q": data.documents(data.q), "k": data.documents(data.k), "v": data.documents(data.v)}
        for group in groups:
            length = shape.lengths[group[0]]
            binding = session.io_binding()
            for name, documents in tensors.items():
                stacked = torch.stack([documents[i] for i in group]).flatten(2).numpy()
                bind(binding, name, stacked)
            counts = {"seqlens_k": np.full(len(group), length - 1, np.int32), "total": np.array(length, np.int32)}
            for name, count in counts.items():
                bind(binding, name, count)
            cache = (len(group), shape.kv_heads, length, shape.head_dim)
            sizes = {"o": (len(group), length, shape.heads * shape.head_dim), "present_k": cache, "present_v": cache}
            for name, size in sizes.items():
                values.append(onnxruntime.OrtValue.ortvalue_from_shape_and_type(size, np.float32))
                binding.bind_ortvalue_output(name, values[-1])
            bindings.append(binding)

        def call():
            for binding in bindings:
                session.run_with_iobinding(binding)

        def outputs():
            call()
            results = [torch.from_numpy(binding.get_outputs()[0].numpy()) for binding in bindings]
            results = [result.unflatten(2, (shape.heads, shape.head_dim)) for result in results]
            return {"o": unpack(groups, results, shape.lengths)}

        return Way(call, outputs, values)

    check = Torch.check
    sample = Torch.sample


class Mxflash:
    """The binary, through `mxflash bench`: it makes its own BF16 inputs, of the same distribution, and times whole
    calls, quantization included. Its time for both phases is the sum of two calls, each of which quantizes anew."""

    ceiling = "fp32"

    def __init__(self, binary, recipe, threads, engine):
        self.binary = binary
        self.recipe = recipe
        self.name = f"mxflash {recipe}" if engine == "auto" else f"mxflash {recipe} ({engine})"
        self.options = ["--threads", str(threads), "--engine", engine]
        self.tuning = {}

    def bench(self, shape, workload, recipe, *options):
        return bench_json(self.binary, shape, workload, recipe, *self.options, *options)

    def prepare(self, data, phases):
        self.shape = data.shape
        self.phases = phases
        self.only = [] if "forward+backward" in phases else ["--forward-only"]

    def check(self, data, kv_heads):
        """The float64 check of `mxflash bench`, on its own inputs."""
        del data, kv_heads
        result = self.bench(self.shape, self.workload, self.recipe, *self.only, "--repeats", "1", "--warmup", "0")
        entry = result["benchmarks"][0]
        self.engine = entry["engine"]["name"]
        self.ceiling = "bf16" if self.engine == "cpu:amx" else "fp32"
        self.tuning = {phase: {"chosen": f"engine {self.engine}", "ms": {}} for phase in self.phases}
        if entry["no_backward"] is not None:
            self.phases = ["forward"]
        phase = self.phases[-1]
        return {phase: entry["check"] | {"answers": "its own inputs"}}

    def sample(self, repeats):
        options = [*self.only, "--no-check", "--repeats", str(repeats), "--warmup", "1"]
        entry = self.bench(self.shape, self.workload, self.recipe, *options)["benchmarks"][0]
        forward = entry["forward"]["samples_ms"]
        samples = {"forward": forward}
        if entry["backward"] is not None:
            backward = entry["backward"]["samples_ms"]
            samples["forward+backward"] = [a + b for a, b in zip(forward, backward, strict=True)]
        return samples

    def peak_bytes(self, shape, workload, *options):
        """The largest resident set of a process that makes its inputs and makes one call."""
        command = bench_command(self.binary, shape, workload, self.recipe, *self.options, *options)
        command += ["--no-check", "--repeats", "1", "--warmup", "0"]
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", PEAK_OF_CHILD, *command], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}")
        return 1024 * int(done.stdout)


def bench_command(binary, shape, workload, recipe, *options):
    sizes = {"tokens": shape.tokens, "heads": shape.heads, "kv-heads": shape.kv_heads, "head-dim": shape.head_dim}
    command = [str(binary), "bench", "--workload", workload, "--recipe", recipe, "--json", "-"]
    return command + [f"--{name}={value}" for name, value in sizes.items()] + list(options)


def bench_json(binary, shape, workload, recipe, *options):
    command = bench_command(binary, shape, workload, recipe, *options)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: a wrong answer, which the JSON says.
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


class Ceilings:
    """What this machine gives to large products and a large copy, by torch, for 1 thread and all. Other work on the
    machine can only lower it: measured several times over the run, the best counts."""

    size = 3072
    copy_bytes = 1 << 29

    def __init__(self, threads):
        self.threads = threads
        self.samples = {str(count): {} for count in sorted({1, threads})}

    def measure(self):
        for count, samples in self.samples.items():
            torch.set_num_threads(int(count))
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                a, b = (torch.randn(self.size, self.size).to(dtype) for _ in range(2))
                product = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
                rate = 2 * self.size**3 / min(milliseconds(product, 3, 1)) / 1e6
                samples.setdefault(f"{name}_gflops_per_second", []).append(rate)
            source = torch.zeros(self.copy_bytes // 4)
            copy = functools.partial(torch.empty_like(source).copy_, source)
            rate = 2 * self.copy_bytes / min(milliseconds(copy, 3, 1)) / 1e6
            samples.setdefault("copy_gb_per_second", []).append(rate)
        torch.set_num_threads(self.threads)

    def report(self):
        return {
            "product": f"torch.mm of {self.size} x {self.size}",
            "copy": f"{self.copy_bytes >> 20} MiB, bytes read and written",
            "threads": {
                count: {name: max(values) for name, values in samples.items()}
                for count, samples in self.samples.items()
            },
            "samples": self.samples,
        }
