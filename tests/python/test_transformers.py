"""mxflash as an attention of Hugging Face transformers."""

import itertools
import types

import pytest
import torch
import transformers
from transformers import AttentionInterface

import mxflash
import mxflash.capture
from mxflash.transformers import padding_mask, register
from tiny_models import assert_same_bits, assert_within, build, llama, register_erring, step, tokens

CUTS = [0, 13, 50, 64]  # Documents that begin and end inside of blocks.


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def offsets(cuts=CUTS) -> torch.Tensor:
    return torch.tensor(cuts, dtype=torch.int32)


def positions(cuts=CUTS) -> torch.Tensor:
    return torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cuts)])[None]


def packed(by: str) -> dict:
    """How a pack is told: as transformers' collator does, or by position_ids alone."""
    if by == "position_ids":
        return {"position_ids": positions()}
    lengths = {"cu_seq_lens_q": offsets(), "cu_seq_lens_k": offsets(), "max_length_q": 37, "max_length_k": 37}
    return {"position_ids": positions()} | lengths


@pytest.mark.parametrize("how", ["ones", "padded", "static", "compiled"])
def test_a_mask_or_a_cache_beside_packed_positions_keeps_documents_apart(how):
    register("mx-packed", recipe="bf16")
    model = llama(attn_implementation="mx-packed")
    ids, changed = tokens(1, 64), tokens(1, 64)
    changed[:, : CUTS[1]] = tokens(1, CUTS[1], seed=2)
    inputs = {"position_ids": positions(), "use_cache": how == "static"}
    if how != "static":
        inputs["attention_mask"] = torch.ones(1, 64, dtype=torch.int64)
    if how == "padded":
        inputs["attention_mask"][:, -2:] = 0
    run = torch.compile(model, fullgraph=True, backend="eager") if how == "compiled" else model

    def logits(x):
        cache = transformers.StaticCache(config=model.config, max_cache_len=80) if how == "static" else None
        with torch.no_grad():
            return run(x, past_key_values=cache, **inputs).logits[:, CUTS[1] : 62]

    assert_same_bits(logits(changed), logits(ids), "logits of other documents")


def test_padding_between_tokens_and_a_window_are_refused():
    register("mx-packed", recipe="bf16")
    changes = {"sliding_window": 6, "attn_implementation": "mx-packed"}
    model = build(transformers.MistralForCausalLM, transformers.MistralConfig, **changes)
    mask = torch.ones(1, 40, dtype=torch.int64)
    mask[0, 15] = 0
    with pytest.raises(ValueError, match="padding between tokens given with a sliding window"):
        model(tokens(1, 40), attention_mask=mask)


def measured_errors(model, ids, inputs, recipe) -> dict[str, float]:
    """Relative errors of the recipe on what the model's layers feed it: rms over rms, against float64; the worst."""
    with mxflash.capture.record(model) as recording:
        step(model, ids, **inputs)
    worst = dict.fromkeys(("o", "dq", "dk", "dv"), 0.0)
    for layer in recording.layers:
        t, metadata = recording[layer], recording.metadata(layer)
        window = None
        if "window" in metadata:
            window = tuple(None if bound == "inf" else int(bound) for bound in metadata["window"].split(","))
        how = {"window": window, "scale": float(metadata["softmax_scale"]), "causal": metadata["causal"] == "true"}
        q, k, v, do, cu = t["q"], t["k"], t["v"], t["do"], t["cu_seqlens"]
        given = [mxflash.attention(q, k, v, cu, recipe, **how)[0]]
        given += mxflash.attention_backward(do, q, k, v, cu_seqlens=cu, recipe=recipe, **how)
        exact = [mxflash.exact_attention(q, k, v, cu, **how)[0]]
        exact += mxflash.exact_attention_backward(do, q, k, v, cu, **how)
        for name, a, b in zip(worst, given, exact, strict=True):
            worst[name] = max(worst[name], float((a - b).norm() / b.norm()))
    return worst


def check_against_sdpa(model, ids, inputs, recipe) -> None:
    """Loss, logits and gradients of a recipe next to the model's own sdpa.

    What is allowed follows from the recipe: its relative errors on this model's own q, k, v, dO are measured against
    float64, and sdpa with random errors of those sizes shows how the model carries them on. Errors of quantization are
    neither independent nor normal, so four times the largest element of three such runs is allowed.
    """
    model.set_attn_implementation("sdpa")
    errors = measured_errors(model, ids, inputs, recipe)
    # bf16: q, k, v, dO, P and dS are rounded by at most 2^-9 each, logits of size t by 2 t 2^-9, with t up to 8 here.
    if recipe == "bf16":
        assert max(errors.values()) < 2.0**-6, errors
    expected = step(model, ids, **inputs)
    allowed = dict.fromkeys(expected, 0.0)
    for seed in range(3):
        model.set_attn_implementation(register_erring(errors, seed))
        for name, value in step(model, ids, **inputs).items():
            allowed[name] = max(allowed[name], 4 * float((value - expected[name]).abs().max()))
    # One number instead of a tensor: of a few runs it may hit near zero; the logits say how far it can be off at least.
    allowed["loss"] = max(allowed["loss"], allowed["logits"] / ids.numel() ** 0.5)
    model.set_attn_implementation(register(f"mx-{recipe}", recipe=recipe))
    for name, value in step(model, ids, **inputs).items():
        assert_within(value, expected[name], allowed[name], f"{recipe}: {name}")


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp4"])
def test_llama_loss_and_gradients(recipe):
    check_against_sdpa(llama(), tokens(2, 45), {}, recipe)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_llama_packed(recipe):
    check_against_sdpa(llama(), tokens(1, 64), {"position_ids": positions()}, recipe)


def test_sliding_window_of_mistral():
    # Seven tokens: a window that is one off is far outside of what bf16 may err.
    model = build(transformers.MistralForCausalLM, transformers.MistralConfig, sliding_window=7)
    check_against_sdpa(model, tokens(2, 40), {}, "bf16")


def test_layers_with_and_without_window_of_qwen():
    model = build(
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config,
        sliding_window=9,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"],
    )
    check_against_sdpa(model, tokens(1, 64), {"position_ids": positions()}, "bf16")


def test_gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64, "initializer_range": 0.1}
    dropouts = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts)).train()
    check_against_sdpa(model, tokens(2, 40), {}, "bf16")


def test_encoder_sees_both_sides():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=96
    )
    model = transformers.BertModel(config).eval()
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[1, 12:] = 0
    results = []
    for name in ("sdpa", register("mx-bf16", recipe="bf16")):
        model.set_attn_implementation(name)
        results.append(model(ids, attention_mask=mask).last_hidden_state.detach())
    # A layer norm's results, of size 1, made of values rounded to bfloat16 (2^-9 each) once: eight of those.
    assert_within(results[1][0], results[0][0], 2.0**-6, "row without padding")
    assert_within(results[1][1, :12], results[0][1, :12], 2.0**-6, "row with padding")


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp4"])
def test_documents_do_not_see_each_other(recipe, by):
    model = llama()
    model.set_attn_implementation(register(f"mx-{recipe}", recipe=recipe, seed=3))
    ids = tokens(1, 64)
    other = ids.clone()
    other[:, : CUTS[1]] = tokens(1, CUTS[1], seed=9)
    results = [model(given, use_cache=False, **packed(by)).logits.detach() for given in (ids, other)]
    assert not torch.equal(results[0][:, : CUTS[1]], results[1][:, : CUTS[1]])
    assert_same_bits(results[1][:, CUTS[1] :], results[0][:, CUTS[1] :], f"{recipe}: documents after the changed one")


def test_collator_of_transformers():
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    ids = tokens(1, 64)
    features = [{"input_ids": ids[0, a:b].tolist()} for a, b in itertools.pairwise(CUTS)]
    batch = collator(features)
    model = llama()
    model.set_attn_implementation(register("mx"))
    given = model(**batch, use_cache=False)
    expected = model(ids, labels=batch["labels"], position_ids=positions(), use_cache=False)
    assert_same_bits(given.logits.detach(), expected.logits.detach(), "collator")
    assert_same_bits(given.loss.detach(), expected.loss.detach(), "collator: loss")


def call(recipe, q, k, v, mask=None, causal=True, **others):
    """The attention function alone, on [batch, heads, tokens, dim]: [batch, heads, tokens, dim] again."""
    module = types.SimpleNamespace(is_causal=causal)
    name = register(f"mx-{recipe}", recipe=recipe, seed=5)
    output, weights = AttentionInterface()[name](module, q, k, v, mask, **others)
    assert weights is None
    return output.transpose(1, 2)


def qkv(batch, length, seed=0, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, length, heads, 32, generator=generator).transpose(1, 2).requires_grad_(grad)
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_bf16_against_sdpa_element_by_element(causal, window):
    q, k, v = qkv(2, 40)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    visible = torch.ones(40, 40, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if window:
        visible &= distance.abs() < window
    k_all, v_all = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k_all, v_all, attn_mask=visible, scale=0.3)
    given = call("bf16", q, k, v, causal=causal, sliding_window=window, scaling=0.3)
    # q and k rounded by 2^-9 each move a logit by at most delta; a row's weights then by a factor of at most
    # exp(2 delta); P and v are rounded by 2^-9 each, the sum of weights like P. 1.1 for products of these.
    delta = 2 * 2.0**-9 * 0.3 * (q.abs() @ k_all.abs().transpose(2, 3)).masked_fill(~visible, 0).amax(3, keepdim=True)
    allowed = 1.1 * (torch.expm1(2 * delta) + 3 * 2.0**-9) * v_all.abs().amax(2, keepdim=True)
    assert_within((given - expected) / allowed, torch.zeros_like(given), 1.0, "o in units of what is allowed")


RECIPES = ["bf16", "mxfp8", "mxfp8-tokenblock", "fp4"]


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_equals_document_by_document(recipe, by):
    tensors = qkv(1, 64, grad=True)
    do = torch.randn(1, 4, 64, 32, generator=torch.Generator().manual_seed(4))
    o = call(recipe, *tensors, **packed(by))
    gradients = torch.autograd.grad(o, tensors, do)
    for a, b in itertools.pairwise(CUTS):
        own = [t[:, :, a:b].detach().clone().requires_grad_() for t in tensors]
        alone = call(recipe, *own)
        assert_same_bits(o[:, :, a:b], alone, f"{recipe}: o of tokens {a} to {b}")
        for name, whole, part in zip("qkv", gradients, torch.autograd.grad(alone, own, do[:, :, a:b]), strict=True):
            assert_same_bits(whole[:, :, a:b], part, f"{recipe}: d{name} of tokens {a} to {b}")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_equals_no_padding(recipe, side):
    lengths = [37, 21, 40]
    tensors = qkv(3, 40, grad=True)
    mask = torch.zeros(3, 40, dtype=torch.bool)
    own = [slice(40 - n, 40) if side == "left" else slice(0, n) for n in lengths]
    for row, place in enumerate(own):
        mask[row, place] = True
    do = torch.randn(3, 4, 40, 32, generator=torch.Generator().manual_seed(4))
    o = call(recipe, *tensors, mask)
    gradients = torch.autograd.grad(o, tensors, do)
    for row, place in enumerate(own):
        alone = [t[row : row + 1, :, place].detach().clone().requires_grad_() for t in tensors]
        single = call(recipe, *alone)
        assert_same_bits(o[row : row + 1, :, place], single, f"{recipe}: o of row {row}")
        for name, whole, part in zip(
            "qkv", gradients, torch.autograd.grad(single, alone, do[row : row + 1, :, place]), strict=True
        ):
            assert_same_bits(whole[row : row + 1, :, place], part, f"{recipe}: d{name} of row {row}")
    hidden = ~mask[:, None, :, None].expand_as(o)
    assert_same_bits(o[hidden], torch.zeros_like(o[hidden]), "o of padding")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_a_model(side):
    # Whole models differ in their products' last bits between batch sizes, and by what bf16 makes of that: logits up to
    # 10, a few roundings of 2^-9 that land on the other side, each in one of 32 dims.
    model = llama()
    model.set_attn_implementation(register("mx-bf16", recipe="bf16"))
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.int64)
    own = slice(8, 30) if side == "left" else slice(0, 22)
    mask[1] = 0
    mask[1, own] = 1
    place = (mask.cumsum(1) - 1).clamp(min=0)
    given = model(ids, attention_mask=mask, position_ids=place, use_cache=False).logits.detach()
    alone = model(ids[1:, own], use_cache=False).logits.detach()
    assert_within(given[1:, own], alone, 10 * 2.0**-9, f"{side} padding")


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("new", [1, 5])
def test_new_tokens_on_a_cache_are_the_last(recipe, new):
    q, k, v = qkv(2, 40)
    whole = call(recipe, q, k, v)
    assert_same_bits(call(recipe, q[:, :, -new:], k, v), whole[:, :, -new:], f"{recipe}: {new} new tokens")
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, :11] = False
    assert_same_bits(
        call(recipe, q[:, :, -new:], k, v, mask), call(recipe, q, k, v, mask)[:, :, -new:], f"{recipe}: left padding"
    )


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("window", [None, 6])
def test_generate_equals_full_recompute(cache, window):
    kind = (transformers.LlamaForCausalLM, transformers.LlamaConfig)
    if window:
        kind = (transformers.MistralForCausalLM, transformers.MistralConfig)
    model = build(*kind, **({"sliding_window": window} if window else {}))
    model.set_attn_implementation(register("mx"))
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    given = model.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, cache_implementation=cache
    )
    for row, start in ((0, 4), (1, 0)):
        logits = model(given[row : row + 1, start:], use_cache=False).logits.detach()[0, -13:-1]
        # The best token of a full recompute, or one that last bits of the model's other products may put above it:
        # a code of E4M3 that moves is 2^-4 of one weight's share of one head; logits are of size 5.
        chosen = logits.gather(1, given[row, -12:, None])[:, 0]
        assert_within(chosen, logits.max(1).values, 0.05, f"row {row}: logit of the generated token")


def test_autocast():
    model = llama()
    model.set_attn_implementation(register("mx"))
    with mxflash.capture.record(model) as recording, torch.autocast("cpu", torch.bfloat16):
        step(model, tokens(1, 20))
    assert {tensor.dtype for name, tensor in recording[0].items() if "cu" not in name} == {torch.bfloat16}


def test_window_of_one_sees_itself():
    q, k, v = qkv(1, 20)
    v = v.bfloat16().float()
    expected = v.repeat_interleave(2, 1)
    # A product and a division in FP32, of values below 4.
    assert_within(call("bf16", q, k, v, sliding_window=1), expected, 2.0**-21, "window of one")
    both = call("bf16", torch.zeros_like(q), k, v, causal=False, sliding_window=2)
    # Equal weights of up to three neighbours; v is exact and P, 1 each, too.
    mean = torch.stack([expected[:, :, max(i - 1, 0) : i + 2].mean(2) for i in range(20)], 2)
    assert_within(both, mean, 2.0**-21, "window of two on both sides")


def test_one_graph():
    model = llama()
    model.set_attn_implementation(register("mx"))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    padded = {"attention_mask": (torch.arange(64) >= 11).long()[None]}
    for inputs in ({}, packed("position_ids"), packed("cu_seq_lens"), padded):
        ids = tokens(1, 64)
        given = compiled(ids, use_cache=False, **inputs).logits.detach()
        expected = model(ids, use_cache=False, **inputs).logits.detach()
        assert_same_bits(given, expected, f"compiled with {list(inputs)}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dropout": 0.1}, "dropout: 0.1 given, 0 allowed"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux: attention sinks given"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"indices": torch.zeros(1)}, "indices"),
        ({"output_attentions": True}, "output_attentions"),
        ({"sliding_window": 0}, "sliding_window: 0 given"),
        ({"mask": torch.ones(1, 1, 20, 20, dtype=torch.bool)}, "attention_mask: 4 dimensions given, 2 "),
        ({"mask": torch.ones(1, 21, dtype=torch.bool)}, "attention_mask: 21 keys given"),
        ({"cu_seq_lens_q": offsets([0, 20])}, "cu_seq_lens_k: None given"),
        ({"cu_seq_lens_q": offsets([0, 19]), "cu_seq_lens_k": offsets([0, 20])}, "cu_seqlens"),
        ({"position_ids": torch.zeros(3, 1, 20)}, "position_ids: 3 dimensions given"),
        (
            {
                "mask": torch.tensor([[False] * 3 + [True] * 17]),
                "cu_seq_lens_q": offsets([0, 20]),
                "cu_seq_lens_k": offsets([0, 20]),
            },
            "a padding mask and cu_seq_lens_q",
        ),
    ],
)
def test_refused(given, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call("bf16", *qkv(1, 20), **given)


def test_refused_masks():
    shape = {"batch_size": 1, "q_length": 8, "kv_length": 8, "allow_is_causal_skip": True}
    with pytest.raises(ValueError, match="or_mask_function"):
        padding_mask(**shape, use_vmap=True)
    with pytest.raises(ValueError, match="later keys"):
        padding_mask(**shape, mask_function=lambda b, h, q, k: (k <= q) | ((q < 3) & (k < 3) & (b == h)))
    with pytest.raises(ValueError, match="attention_chunk_size"):
        padding_mask(**shape, local_size=4, config=types.SimpleNamespace(attention_chunk_size=4))
    with pytest.raises(ValueError, match="attention_mask: 7 columns"):
        padding_mask(**shape, attention_mask=torch.ones(1, 7, dtype=torch.bool))


def test_refused_window_that_only_a_dense_mask_has():
    window = {"sliding_window": 6, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    experts |= {"shared_expert_intermediate_size": 32}
    model = build(transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig, **window, **experts)
    model.set_attn_implementation(register("mx"))
    model(tokens(1, 6))
    with pytest.raises(ValueError, match="sliding_window: None given by Qwen2MoeAttention"):
        model(tokens(1, 7))


def test_refused_names_and_recipes():
    with pytest.raises(ValueError, match="without 'flash'"):
        register("mxflash")
    with pytest.raises(ValueError, match="recipe"):
        register("mx-wrong", recipe="mxfp9")
    with pytest.raises(ValueError, match="beta: not a setting"):
        register("mx-wrong", beta=2)
    assert "mx-wrong" not in AttentionInterface()
