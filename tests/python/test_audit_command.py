"""mxflash-audit: exit codes, JSON, files and what it says of wrong usage."""

import json

import numpy as np
import pytest

import mxflash
from mxflash._audit.command import main

RIGHT = "import mxflash\ndef right(q, k, v, cu): return mxflash.attention(q, k, v, cu, recipe='bf16')\n"
WRONG = "def shifted(q, k, v, cu): return right(q, k, v, cu)[0] * 0.9\nclass A: f = staticmethod(right)\nnumber = 3\n"
RAISES = "def raises(*_): raise ValueError('mine')\ndef short(q, k, v, cu): return q[1:]\n"
NUMPY = ["--framework", "numpy", "--probes", "5"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(RIGHT + WRONG + RAISES, encoding="utf-8")
    (tmp_path / "half.py").write_text("import not_there_at_all\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # Undone after the test, with what the command adds.
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    return "mine"


def test_holds_and_does_not(module, capsys):
    assert main([f"{module}:right", *NUMPY]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("audit of mine:right: holds\n7 documents, 347 queries") and err == ""
    assert main([f"{module}:A.f", *NUMPY]) == 0
    assert main([f"{module}:shifted", *NUMPY]) == 1
    assert "row sum                 fails" in capsys.readouterr().out


def test_our_own_by_name(capsys):
    assert main(["mxflash:attention", *NUMPY]) == 0
    assert "forward alone" in capsys.readouterr().out
    pytest.importorskip("torch")
    # Its backward keeps causality in blocks of 32, unless it is asked for more.
    assert main(["mxflash.torch:attention", "--probes", "40", "--json", "-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in report["checks"] if check["result"] == "fails"] == ["later tokens, backward"]
    assert main(["mxflash.torch:attention", "--no-backward", "--probes", "5", "--dtype", "bfloat16"]) == 0


def test_json_and_file(module, tmp_path, capsys):
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal((40, 2, 16), np.float32) for name in ("q", "k", "v", "do")}
    tensors["cu_seqlens"] = np.array([0, 9, 40], np.int32)
    mxflash.save("layer.safetensors", tensors, {"causal": "true", "softmax_scale": "0.25"})
    assert main([f"{module}:right", "layer.safetensors", *NUMPY, "--json", "report.json"]) == 0
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["holds"] and report["problem"]["tokens_q"] == 40 and report["problem"]["dtype"] == "float32"
    assert "audit of" in capsys.readouterr().out
    assert main([f"{module}:right", "layer.safetensors", *NUMPY, "--full", "--json", "-"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["problem"]["causal"]
    assert any("causal, where every later key was to be seen" in finding for finding in report["findings"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine"], "function: 'mine' given, MODULE:FUNCTION allowed"),
        (["nowhere:f"], "function: 'nowhere:f' given, but there is no module nowhere"),
        (["mine:nothing"], "function: 'mine:nothing' given, but mine has no nothing"),
        (["mine:number"], "function: 'mine:number' given, but that is not a function"),
        (["mine:right", "absent.safetensors"], "absent.safetensors"),
        (["mine:right", "--probes", "0"], "--probes: 0 given, 1 or more allowed"),
        (["mine:right", "--seed", "-1"], "--seed: -1 given, 0 or more allowed"),
        (["mine:right", *NUMPY, "--json", "no/such/folder.json"], "--json: "),
    ],
)
def test_bad_input_is_one_line_and_code_2(module, capsys, arguments, message):
    del module
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("mxflash-audit: ") and err.count("\n") == 1


def test_usage_is_code_2(capsys):
    for arguments in ([], ["a:b", "--framework", "abacus"], ["a:b", "--dtype", "int8"], ["a:b", "--probes", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    assert "usage: mxflash-audit" in capsys.readouterr().err


def test_a_file_without_k(module, capsys):
    mxflash.save("q.safetensors", {"q": np.zeros((4, 1, 8), np.float32)})
    assert main([f"{module}:right", "q.safetensors"]) == 2
    assert "no tensor k" in capsys.readouterr().err


def test_what_the_function_raises_is_shown_whole_and_is_no_finding(module, capsys):
    del module
    assert main(["half:f"]) == 2
    assert "Traceback" in (err := capsys.readouterr().err) and "not_there_at_all" in err
    assert main(["mine:raises", *NUMPY]) == 2
    assert "in raises" in (err := capsys.readouterr().err) and "ValueError: mine" in err


def test_a_wrong_shape_is_one_line(module, capsys):
    del module
    assert main(["mine:short", *NUMPY]) == 2
    assert capsys.readouterr().err == "mxflash-audit: o: fn returned shape [346, 4, 64], [347, 4, 64] allowed\n"
