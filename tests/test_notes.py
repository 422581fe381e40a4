"""What is noted of a loop, apart from a loop."""

import re

import pytest

from cpbkit.gpu_check.notes import PADDING


@pytest.mark.parametrize(
    ("text", "fills"),
    [
        ("ids = np.full(self.max_len, 0)", True),
        ("x += [0] * (n - len(x))", True),
        ("torch.zeros(b, max(lengths))", True),
        ("self.pos = nn.Parameter(torch.zeros(cfg.max_len, d))", False),
        ("nn.Embedding(max_length, d)", False),
    ],
)
def test_a_line_that_fills_rows_up_is_told_from_one_that_makes_weights(text, fills):
    assert bool(re.search(PADDING, text)) == fills
