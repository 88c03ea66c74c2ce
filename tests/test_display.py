"""What results show of themselves in a notebook: the same as in text, and nothing secret."""

from __future__ import annotations

import html
import re

import pytest
import torch
from torch import nn

import sectorch
from sectorch.ckks import explain as explain_encrypted

MODEL = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
X = torch.tensor([[0.5, -1.25, 3.0, 1234.5678]])


def text_of(page: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page))


def profile():
    with sectorch.profile() as seen:
        sectorch.secure(MODEL)(X)
    return seen


SHOWN = {
    "profile": profile,
    "explanation": lambda: sectorch.explain(MODEL, X),
    "difference": lambda: sectorch.diff(MODEL, X),
    "program": lambda: sectorch.program(MODEL, X),
    "of ciphertexts": lambda: explain_encrypted(nn.Sequential(nn.Linear(4, 3)).eval(), X),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_shows_what_the_text_says(name):
    result = SHOWN[name]()
    page = result._repr_html_()
    assert text_of(page).split() == result.table().split() != []
    assert "<script" not in page and "http" not in page


def test_a_shared_tensor_shows_what_is_public():
    shown = text_of(sectorch.share(X)._repr_html_())
    assert "(1, 4)" in shown and "fraction bits" in shown and "neither knows it" in shown
    assert not any(digits in shown for digits in ("1234", "1.25"))


def test_layers_names_are_words():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<b>[red]", nn.Linear(4, 2))

        def forward(self, x):
            return getattr(self, "<b>[red]")(x)

    page = sectorch.explain(Named().eval(), X)._repr_html_()
    assert "<b>" not in page and "&lt;b&gt;[red]" in page


def test_a_plot_of_what_layers_send():
    plot = sectorch.explain(MODEL, X).as_plot()
    assert plot._repr_png_().startswith(b"\x89PNG")
    sent = sum(plot.series["online"].values()) + sum(plot.series["offline"].values())
    seen = sectorch.explain(MODEL, X)
    assert sent == pytest.approx((seen.online_bytes + seen.offline_bytes) / 1e3)


def test_a_plot_is_drawn_into_axes():
    """Into those that are given, and else into those of a new figure."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    _, axes = pyplot.subplots(2)
    found = sectorch.explain(MODEL, X)
    assert found.plot(axes[1]) is axes[1] and found.plot(ax=axes[0]) is axes[0]
    made = found.plot()
    assert made not in axes and made.figure is not axes[0].figure
    for one in (*axes, made):
        assert (one.get_xlabel(), one.get_ylabel()) == ("layer", "kB sent")
        assert [text.get_text() for text in one.get_legend().get_texts()] == ["offline", "online"]
    pyplot.close("all")
