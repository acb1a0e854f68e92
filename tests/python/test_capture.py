"""Recording q, k, v and dO of running models."""

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface

import mxflash
import mxflash.capture
from mxflash.transformers import register
from tiny_models import assert_same_bits, assert_within, build, llama, step, tokens

CUTS = [0, 13, 50, 64]
POSITIONS = torch.cat([torch.arange(13), torch.arange(37), torch.arange(14)])[None]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def window_of(metadata):
    if "window" not in metadata:
        return None
    return tuple(None if bound == "inf" else int(bound) for bound in metadata["window"].split(","))


class Watched:
    """What the attentions of a model got and gave, noted apart from the recording: projections' own gradients."""

    def __init__(self, model):
        self.outputs, self.gradients = {}, {}
        self._handles = []
        for layer, block in enumerate(model.model.layers):
            attention = block.self_attn
            self._handles.append(attention.o_proj.register_forward_pre_hook(self._keep(layer, self.outputs)))
            for name in ("q", "k", "v"):
                projection = getattr(attention, f"{name}_proj")
                self._handles.append(projection.register_forward_hook(self._keep_gradient((layer, name))))

    @staticmethod
    def _keep(layer, into):
        def hook(_module, inputs):
            into[layer] = inputs[0].detach().clone()

        return hook

    def _keep_gradient(self, key):
        def hook(_module, _inputs, output):
            output.register_hook(lambda gradient: self.gradients.__setitem__(key, gradient.clone()))

        return hook

    def remove(self):
        for handle in self._handles:
            handle.remove()


def check_reproduces(recording, watched, layer, shape):
    """The file's q, k, v, do give in float64 what the model's own attention gave: o, and dv at the projection.

    q and k were turned by rotary positions after their projections, v was not: its gradient is the projection's.
    """
    t, metadata = recording[layer], recording.metadata(layer)
    how = {
        "window": window_of(metadata),
        "scale": float(metadata["softmax_scale"]),
        "causal": metadata["causal"] == "true",
    }
    o, _ = mxflash.exact_attention(t["q"], t["k"], t["v"], t["cu_seqlens"], **how)
    _, _, dv = mxflash.exact_attention_backward(t["do"], t["q"], t["k"], t["v"], t["cu_seqlens"], **how)
    # Sums of at most 64 weights with FP32 roundings: 2^-24 each, of values of the largest size, and a softmax of logits
    # up to 20 whose FP32 errors are 2^-24 times that: 100 times 2^-24.
    expected = watched.outputs[layer].reshape(shape[0] * shape[1], -1)
    assert_within(o.flatten(1), expected, 2.0**-17 * float(expected.abs().max()), f"layer {layer}: o")
    expected = watched.gradients[layer, "v"].reshape(shape[0] * shape[1], -1)
    assert_within(dv.flatten(1), expected, 2.0**-17 * float(expected.abs().max()), f"layer {layer}: dv")


def recorded_step(model, ids, layers=None, heads=None, **inputs):
    with mxflash.capture.record(model, layers, heads) as recording:
        results = step(model, ids, **inputs)
    return recording, results


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("packed", [False, True])
def test_capture_reproduces_the_model(implementation, packed):
    model = llama()
    model.set_attn_implementation(implementation)
    ids = tokens(1, 64) if packed else tokens(2, 32)
    inputs = {"position_ids": POSITIONS} if packed else {}
    watched = Watched(model)
    recording, _ = recorded_step(model, ids, **inputs)
    watched.remove()
    assert recording.layers == [0, 1]
    for layer in recording.layers:
        t = recording[layer]
        assert t["q"].shape == t["do"].shape == (64, 4, 32)
        assert t["k"].shape == t["v"].shape == (64, 2, 32)
        assert all(tensor.device.type == "cpu" and not tensor.requires_grad for tensor in t.values())
        assert t["cu_seqlens"].tolist() == (CUTS if packed else [0, 32, 64])
        check_reproduces(recording, watched, layer, ids.shape)


def test_capture_of_windows():
    model = build(transformers.MistralForCausalLM, transformers.MistralConfig, sliding_window=7)
    watched = Watched(model)
    recording, _ = recorded_step(model, tokens(2, 32))
    watched.remove()
    assert recording.metadata(0)["window"] == "6,inf"
    check_reproduces(recording, watched, 0, (2, 32))


@pytest.mark.parametrize("implementation", ["sdpa", "mx-bf16"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_removed(implementation, side):
    register("mx-bf16", recipe="bf16")
    model = llama()
    model.set_attn_implementation(implementation)
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    own = slice(6, 20) if side == "left" else slice(0, 14)
    mask[1] = 0
    mask[1, own] = 1
    recording, _ = recorded_step(model, ids, attention_mask=mask)
    whole, _ = recorded_step(model, ids)
    kept = mask.bool().flatten()
    assert recording[0]["cu_seqlens"].tolist() == [0, 20, 34]
    for name in ("q", "k", "v"):
        assert_same_bits(recording[0][name], whole[0][name][kept], f"{side} padding: {name}")


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "mx-bf16"])
def test_nothing_changes(implementation):
    register("mx-bf16", recipe="bf16")
    model = llama()
    model.set_attn_implementation(implementation)
    ids = tokens(1, 64)
    expected = step(model, ids, position_ids=POSITIONS)
    _, given = recorded_step(model, ids, position_ids=POSITIONS)
    for name, value in expected.items():
        assert_same_bits(given[name], value, name)


def test_own_attention_is_recorded_by_its_offsets():
    model = llama()
    model.set_attn_implementation(register("mx-bf16", recipe="bf16"))
    cu = torch.tensor(CUTS, dtype=torch.int32)
    recording, _ = recorded_step(model, tokens(1, 64), cu_seq_lens_q=cu, cu_seq_lens_k=cu, position_ids=POSITIONS)
    assert recording[1]["cu_seqlens"].tolist() == CUTS


def test_heads_keep_their_group():
    model, ids = llama(num_attention_heads=8, num_key_value_heads=2), tokens(1, 20)
    whole, _ = recorded_step(model, ids, layers=[1])
    assert whole.layers == [1]
    for heads, of_keys in (([4, 5], [1]), ([1, 6], [0, 1]), ([0, 2, 5, 7], [0, 1])):
        part, _ = recorded_step(model, ids, layers=[1], heads=heads)
        for name in ("q", "do"):
            assert_same_bits(part[1][name], whole[1][name][:, heads], f"{heads}: {name}")
        for name in ("k", "v"):
            assert_same_bits(part[1][name], whole[1][name][:, of_keys], f"{heads}: {name}")
        assert part.metadata(1)["heads"] == ",".join(map(str, heads))
    for heads, message in (([0, 1, 4], "2 of key/value head 0, 1 of key/value head 1"), ([8], "8 given, 0 to 7")):
        with pytest.raises(ValueError, match=f"heads: .*{message}"):
            recorded_step(model, ids, heads=heads)


def test_generation_is_recorded():
    model = llama()
    for cache in (None, "static"):
        with mxflash.capture.record(model) as recording:
            model.generate(tokens(1, 9), max_new_tokens=4, do_sample=False, cache_implementation=cache)
        t = recording[0]
        assert "do" not in t
        # The prompt, then one token after the other, each with all keys before it.
        assert t["cu_seqlens_q"].tolist() == [0, 9, 10, 11, 12]
        assert t["cu_seqlens_k"].tolist() == [0, 9, 19, 30, 42]
        assert_same_bits(t["k"][9:18], t["k"][:9], "keys of the prompt")


def test_checkpointing_is_recorded_once():
    model, ids = llama().train(), tokens(1, 20)
    plain, _ = recorded_step(model, ids)
    model.activation_checkpointing_enable()
    checkpointed, _ = recorded_step(model, ids)
    for name, tensor in plain[0].items():
        assert_same_bits(checkpointed[0][name], tensor, name)


def test_hooks_are_gone_after_an_exception():
    model = llama()
    original = AttentionInterface.get_interface
    with pytest.raises(ZeroDivisionError), mxflash.capture.record(model) as recording:
        loss = model(tokens(1, 8), labels=tokens(1, 8), use_cache=False).loss
        raise ZeroDivisionError
    assert AttentionInterface.get_interface is original
    assert not model._forward_pre_hooks
    loss.backward()
    model(tokens(1, 8), use_cache=False)
    assert recording[0]["q"].shape[0] == 8
    assert "do" not in recording[0]


def test_refusals(tmp_path):
    model = llama()
    with pytest.raises(ValueError, match="model: a str given"), mxflash.capture.record("model"):
        pass
    with pytest.raises(ValueError, match=r"layers: \[1, 0\] given"), mxflash.capture.record(model, [1, 0]):
        pass
    with mxflash.capture.record(model, [0, 5]) as recording:
        pass
    with pytest.raises(ValueError, match="no attention seen"):
        recording.save(tmp_path / "x.safetensors")
    recording, _ = recorded_step(model, tokens(1, 8), layers=[0, 5])
    with pytest.raises(ValueError, match="layers: 5 given, 0, 1 allowed"):
        recording.save(tmp_path / "{layer}.safetensors")
    recording, _ = recorded_step(model, tokens(1, 8))
    with pytest.raises(ValueError, match=r"for 2 layers, one with \{layer\} allowed"):
        recording.save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"torch\.float64 given, all bfloat16, float16 or float32"):
        recorded_step(llama().double(), tokens(1, 8))
    with pytest.raises(ValueError, match=r"dropout: 0\.5 given"):
        recorded_step(llama(attention_dropout=0.5).train(), tokens(1, 8))
    with pytest.raises(ValueError, match="attention_mask: a pattern given that is no documents"):
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
        mask[0, 0, 6, 1] = False
        recorded_step(model, tokens(1, 8), attention_mask=mask)
    with mxflash.capture.record(model) as recording:
        step(model, tokens(1, 8))
        model(tokens(1, 8), use_cache=False)
    with pytest.raises(ValueError, match="do is known of 1 of 2 calls"):
        recording[0]
    assert not list(tmp_path.iterdir())


class Plain(nn.Module):
    """Two attentions of plain torch: by hand with a mask, and torch's own module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(32, 96)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)
        y = y.transpose(1, 2).flatten(2)
        return self.attention(y, y, y, need_weights=False)[0]


def test_plain_torch_models():
    model, x = Plain(), torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(1))
    document = torch.repeat_interleave(torch.tensor([13, 37, 14]))
    mask = (document[:, None] == document) & torch.ones(64, 64, dtype=torch.bool).tril()
    results = []
    for recorded in (False, True):
        model.zero_grad()
        if recorded:
            with mxflash.capture.record(model) as recording:
                output = model(x, mask)
                output.square().sum().backward()
        else:
            output = model(x, mask)
            output.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        results.append([output.detach(), *gradients])
    for given, expected in zip(results[1], results[0], strict=True):
        assert_same_bits(given, expected, "plain torch, recorded")
    assert recording.layers == [0, 1]
    assert recording[0]["cu_seqlens"].tolist() == CUTS
    assert recording.metadata(0)["softmax_scale"] == "0.5"
    assert (recording.metadata(0)["causal"], recording.metadata(1)["causal"]) == ("true", "false")
    t = recording[0]
    assert_same_bits(t["q"].flatten(1), model.qkv(x)[0, :, :32].detach(), "q")
    gradients = mxflash.exact_attention_backward(t["do"], t["q"], t["k"], t["v"], t["cu_seqlens"], scale=0.5)
    # d(bias) of the projection is the sum over tokens of dq, dk, dv: 64 FP32 additions, and attention's own roundings.
    total = torch.cat([gradient.double().sum(0).flatten() for gradient in gradients])
    assert_within(total, model.qkv.bias.grad, 2.0**-16 * float(total.abs().max()), "gradient of the bias")
    t = recording[1]
    o, _ = mxflash.exact_attention(t["q"], t["k"], t["v"], t["cu_seqlens"], causal=False)
    given = model.attention.out_proj(o.flatten(1).float()).detach()
    assert_within(given, results[1][0][0], 2.0**-18 * float(given.abs().max()), "o of nn.MultiheadAttention")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_torch():
    parts = [torch.randn(n, 2, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 9, 1)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)

    class Model(nn.Module):
        def forward(self, x):
            x = x.transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(x, x * 0.5, x)  # torch: not causal on a CPU.

    model = Model()
    with mxflash.capture.record(model) as recording:
        o = model(nested)
        (o.values() ** 2).sum().backward()
    t = recording[0]
    assert t["cu_seqlens"].tolist() == [0, 5, 14, 15]
    assert_same_bits(t["q"], torch.cat(parts), "q")
    assert_same_bits(t["do"], 2 * o.detach().transpose(1, 2).values(), "do")
    # Sums of 9 values of FP32, of size 3, with weights that FP32 logits of size 5 make.
    exact, _ = mxflash.exact_attention(t["q"], t["k"], t["v"], t["cu_seqlens"], causal=False)
    assert_within(exact, o.detach().transpose(1, 2).values(), 2.0**-19, "o")


def test_other_models_in_the_block_are_not_recorded():
    class Model(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    student, teacher = Model(), Model()
    x = torch.randn(1, 2, 6, 8)
    with mxflash.capture.record(student) as recording:
        teacher(x * 100)
        student(x)
        teacher(x * 100)
    assert recording.layers == [0]
    assert_same_bits(recording[0]["q"], x[0].transpose(0, 1), "q")


def test_torch_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), torch.randn(2, 20, 32)
    causal = torch.ones(20, 20, dtype=torch.bool).triu(1)
    padding = torch.arange(20) >= torch.tensor([[20], [13]])
    with mxflash.capture.record(model) as recording:
        model(x, mask=causal, src_key_padding_mask=padding).sum().backward()
    assert recording.layers == [0, 1]
    assert recording.metadata(1)["causal"] == "true"
    assert recording[1]["cu_seqlens"].tolist() == [0, 20, 33]
    assert recording[1]["do"].shape == (33, 4, 8)
