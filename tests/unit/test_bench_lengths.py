"""Time and memory over lengths: which forms there are, what they compute, and what a file holds."""

from pathlib import Path

import torch
from click.testing import CliRunner
from torch.nn.functional import scaled_dot_product_attention

from bakeoff.apps.bench import lengths, lengths_page
from bakeoff.ops.dilated_attention.reference import dilated_attention


def test_forms_compute_what_they_say(monkeypatch):
    monkeypatch.setattr(lengths, "SEGMENTS", (64, 128))
    monkeypatch.setattr(lengths, "RATES", (1, 2))
    q, k, v = torch.randn(3, 1, 480, 2, 16)
    found = {form.name: form for form in lengths.forms(q, ("eager", "fused"))}
    assert list(found) == ["eager", "equal FLOPs, cudnn", "equal FLOPs, flash", "dense, cudnn"]
    want = dilated_attention(q, k, v, (64, 128), (1, 2), causal=True)
    torch.testing.assert_close(found["eager"].run(q, k, v), want)
    rows = [x.view(5, 96, 2, 16).transpose(1, 2) for x in (q, k, v)]  # 64 / 1 + 128 / 4
    want = scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(found["equal FLOPs, flash"].run(q, k, v), want)
    assert found["equal FLOPs, flash"].flops == 5 * 2 * 4 * 16 * (96 * 97 // 2)
    assert found["dense, cudnn"].flops == 2 * 4 * 16 * (480 * 481 // 2)
    shares = found["equal FLOPs, flash"].flops / found["eager"].flops
    assert 0.9 < shares < 1.1


def test_what_would_take_long_is_left_out(monkeypatch):
    expected = []

    def measured(call, device, budget_s, expected_s):
        expected.append(expected_s)
        call()
        return 2.0, 1 << 30

    monkeypatch.setattr(lengths, "measured", measured)
    monkeypatch.setattr(lengths, "_dense", lambda q, k, v, backend: q + k + v)
    found = [*lengths.run((256, 512), ("eager",), torch.device("cpu"), 16, 16, 0.1, 5.0)]
    assert len(found) == 16
    assert not any(row["reason"] for row in found[:14])
    assert [row["form"] for row in found[14:]] == ["dense, cudnn"] * 2
    assert found[14]["reason"] == "would take about 8 s"
    assert not found[14]["ms"]
    assert set(expected) == {0.0}
    assert found[0]["ms"] == "2000.0000"
    assert found[0]["extra_gib"] == "1.0000"


def test_a_failing_form_is_a_row_with_its_reason(monkeypatch):
    def fails(*_):
        raise RuntimeError("no kernel\nat all")

    monkeypatch.setattr(lengths, "measured", lambda call, *_: call())
    form = lengths.Form("x", fails, 1)
    found, seconds = lengths.row(form, [torch.zeros(1)] * 3, torch.zeros(1), "forward", 0.1, 9.0)
    assert found == {"reason": "no kernel"}
    assert seconds == float("inf")


def test_there_is_nothing_to_measure_without_a_gpu(tmp_path):
    refused = CliRunner().invoke(lengths.main, ["--out", str(tmp_path / "x.csv"), "--device", "cpu"])
    assert refused.exit_code == 1
    assert "measured on a GPU" in refused.output


def test_the_page_is_up_to_date_and_its_pictures_exist():
    page = Path(__file__).resolve().parents[2] / "docs" / "longnet.md"
    done = CliRunner().invoke(lengths_page.main, ["--check", str(page)])
    assert done.exit_code == 0, done.output
    for kind in ("time", "memory"):
        assert (page.parent / "images" / f"h200-dilated-lengths-{kind}.svg").exists()
    stale = lengths_page.filled(
        "<!-- lengths: results/h200/dilated-lengths.csv -->\nold\n<!-- end -->", page.parents[1]
    )
    assert "old" not in stale
    assert "| 1,048,576 |" in stale
