"""Models built from a configuration, nothing downloaded, and an attention that errs by a given amount."""

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

transformers.logging.set_verbosity_error()

VOCABULARY = 96


def llama(**changes) -> transformers.PreTrainedModel:
    """Two layers, 4 query heads on 2 key/value heads of 32 dims, float32."""
    return build(transformers.LlamaForCausalLM, transformers.LlamaConfig, **changes)


def build(kind: type, config: type, **changes) -> transformers.PreTrainedModel:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        # Ten times the usual spread: logits that matter, so that attention does.
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    return kind(config(**(sizes | changes))).eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def step(model: transformers.PreTrainedModel, ids: torch.Tensor, **inputs) -> dict[str, torch.Tensor]:
    """Loss, logits and the gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    output = model(ids, labels=ids, use_cache=False, **inputs)
    output.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"loss": output.loss.detach(), "logits": output.logits.detach()} | gradients


class _Erring(torch.autograd.Function):
    """The identity, with relative noise: of o on the way forward, of dq, dk, dv on the way back."""

    @staticmethod
    def forward(ctx, tensor, forward_error, backward_error, generator):
        ctx.error, ctx.generator = backward_error, generator
        return _noisy(tensor, forward_error, generator)

    @staticmethod
    def backward(ctx, gradient):
        return _noisy(gradient, ctx.error, ctx.generator), None, None, None


def _noisy(tensor: torch.Tensor, error: float, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    return tensor + error * tensor.square().mean().sqrt() * noise


def register_erring(errors: dict[str, float], seed: int) -> str:
    """sdpa whose o, dq, dk and dv have random errors of the given relative sizes."""
    generator = torch.Generator().manual_seed(seed)

    def erring(module, query, key, value, attention_mask, **others):
        query = _Erring.apply(query, 0.0, errors["dq"], generator)
        key = _Erring.apply(key, 0.0, errors["dk"], generator)
        value = _Erring.apply(value, 0.0, errors["dv"], generator)
        output, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **others)
        return _Erring.apply(output, errors["o"], 0.0, generator), weights

    AttentionInterface.register("erring", erring)
    AttentionMaskInterface.register("erring", sdpa_mask)
    return "erring"


def assert_same_bits(given: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert given.shape == expected.shape, f"{what}: shape {tuple(given.shape)}, {tuple(expected.shape)} expected"
    if torch.equal(given, expected):
        return
    difference = (given.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    place = torch.unravel_index(difference.argmax(), difference.shape)
    raise AssertionError(
        f"{what}: {int((given != expected).sum())} elements differ, most at {[int(i) for i in place]}: "
        f"{given[place].item()}, {expected[place].item()} expected"
    )


def assert_within(given: torch.Tensor, expected: torch.Tensor, allowed: float, what: str) -> None:
    difference = (given.double() - expected.double()).abs()
    place = torch.unravel_index(difference.nan_to_num(nan=float("inf")).argmax(), difference.shape)
    worst = difference[place].item()
    assert worst <= allowed, (
        f"{what}: off by {worst:.3e} at {[int(i) for i in place]} ({given[place].item():.6e}, "
        f"{expected[place].item():.6e} expected), {allowed:.3e} allowed"
    )
