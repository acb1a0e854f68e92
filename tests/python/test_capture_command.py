"""mxflash-capture: from a folder with a model to files that the command line reads."""

import json
import os
import subprocess

import numpy as np
import pytest
import torch
import transformers

import mxflash
import mxflash.capture
from mxflash import _capture_command
from tiny_models import assert_same_bits, llama


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def tokenizer(folder):
    """Bytes, one a token: nothing to download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    llama(vocab_size=256).save_pretrained(path)
    tokenizer(path)
    return path


def test_command(folder, tmp_path, capsys):
    texts = []
    for name, text in (("a.txt", "a short one"), ("b.txt", "a longer text. " * 20), ("c.txt", "And another. " * 20)):
        texts.append(str(tmp_path / name))
        (tmp_path / name).write_text(text)
    out = str(tmp_path / "layer{layer}.safetensors")
    arguments = [str(folder), "--text", *texts, "--tokens", "96", "--layers", "1", "--heads", "0,3", "--out", out]
    assert _capture_command.main(arguments) == 0
    path = str(tmp_path / "layer1.safetensors")
    assert capsys.readouterr().out.split() == [path]
    tensors, metadata = mxflash.load(path, "torch")
    assert tensors["q"].dtype == torch.bfloat16
    assert tensors["cu_seqlens"].tolist() == [0, 11, 54, 96]
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor.ndim == 3} == {
        "q": (96, 2, 32),
        "k": (96, 2, 32),
        "v": (96, 2, 32),
        "do": (96, 2, 32),
    }
    assert metadata["causal"] == "true"
    assert float(metadata["softmax_scale"]) == 32**-0.5
    # The same by hand.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    cut = ["a short one", ("a longer text. " * 20)[:43], ("And another. " * 20)[:42]]
    read = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[token for text in cut for token in read(text)["input_ids"]]])
    positions = torch.cat([torch.arange(len(text)) for text in cut])[None]
    with mxflash.capture.record(model, [1], [0, 3]) as recording:
        labels = ids.masked_fill(positions == 0, -100)
        model(ids, position_ids=positions, labels=labels, use_cache=False).loss.backward()
    for name, tensor in recording[1].items():
        assert_same_bits(tensors[name], tensor, name)


def write_gguf(path, model):
    """The model and its byte tokens as GGUF, as a converter from transformers writes a Llama."""
    from gguf import GGUFWriter
    from tokenizers import pre_tokenizers

    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    # There must be a merge: one of two letters that no text here has, in the place of a third.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet[-1] = alphabet[-3] + alphabet[-2]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(alphabet)
    writer.add_token_types([1] * len(alphabet))
    writer.add_token_merges([f"{alphabet[-3]} {alphabet[-2]}"])
    renamed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    parts |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
    for layer in range(config.num_hidden_layers):
        renamed |= {f"model.layers.{layer}.{name}": f"blk.{layer}.{short}" for name, short in parts.items()}
    for name, tensor in model.state_dict().items():
        short, array = renamed[name.removesuffix(".weight")], tensor.numpy()
        if short.endswith(("attn_q", "attn_k")):  # GGUF's rotary positions turn neighbours, transformers' halves.
            heads = array.shape[0] // config.head_dim
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"{short}.weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_gives_the_same_files(folder, tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")  # transformers wants it for GGUF.
    (tmp_path / "text").write_text("The same weights, the same text. " * 3)
    write_gguf(tmp_path / "tiny.gguf", transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    files = []
    for source in ([str(folder)], [str(tmp_path), "--gguf", "tiny.gguf"]):
        out = str(tmp_path / f"{len(files)}.safetensors")
        options = ["--text", str(tmp_path / "text"), "--layers", "1", "--dtype", "float32", "--out", out]
        assert _capture_command.main([*source, *options]) == 0
        files.append(mxflash.load(out, "torch"))
    assert files[0][1] == files[1][1]
    for name, tensor in files[0][0].items():
        assert_same_bits(files[1][0][name], tensor, name)


def test_command_line_reads_the_files(folder, tmp_path):
    """Three commands: capture, run, audit. Python's own reader where there is no binary at hand."""
    out = str(tmp_path / "layer{layer}.safetensors")
    assert _capture_command.main([str(folder), "--tokens", "128", "--layers", "0", "--out", out]) == 0
    path = out.replace("{layer}", "0")
    binary = os.environ.get("MXFLASH")
    if binary:
        ran = subprocess.run(
            [binary, "run", path, "--check", "--json", "-"], capture_output=True, text=True, check=True
        )
        cosine = json.loads(ran.stdout)["accuracy"]["dq"]["cosine"]
        subprocess.run([binary, "audit", path, "--recipe", "mxfp8", "--probes", "8"], check=True, capture_output=True)
    else:
        t, metadata = mxflash.load(path)
        scale = float(metadata["softmax_scale"])
        tensors = t["do"], t["q"], t["k"], t["v"]
        given = mxflash.attention_backward(*tensors, cu_seqlens=t["cu_seqlens"], scale=scale)[0].astype(np.float64)
        exact = mxflash.exact_attention_backward(*tensors, cu_seqlens=t["cu_seqlens"], scale=scale)[0]
        cosine = float((given * exact).sum() / np.linalg.norm(given) / np.linalg.norm(exact))
    # E4M3 errs by 2^-4 an element at most: dq of operands that each do, half of it in the mean, is well above this.
    assert cosine > 0.98


def test_command_refuses(folder, tmp_path, capsys):
    cases = [
        (["nowhere"], "MODEL_FOLDER: 'nowhere' given"),
        ([str(folder), "--tokens", "0"], "--tokens: 0 given"),
        ([str(folder), "--layers", "a"], "--layers: 'a' given"),
        ([str(folder), "--layers", "7"], "layers: 7 given, 0, 1 allowed"),
        ([str(folder), "--heads", "0,1,2"], "heads: 0, 1, 2 given"),
        ([str(folder), "--gguf", "x.gguf"], "--gguf: 'x.gguf' given"),
        ([str(folder), "--text", str(tmp_path / "none")], "No such file"),
        ([str(tmp_path)], "MODEL_FOLDER: "),
    ]
    for arguments, message in cases:
        assert _capture_command.main([*arguments, "--out", str(tmp_path / "{layer}.safetensors")]) == 2, arguments
        said = capsys.readouterr().err
        assert message in said, f"{arguments}: {said}"
        assert said.count("\n") == 1
    with pytest.raises(SystemExit) as exit_code:
        _capture_command.main([str(folder), "--dtype", "float64"])
    assert exit_code.value.code == 2
    assert not list(tmp_path.glob("*.safetensors"))
