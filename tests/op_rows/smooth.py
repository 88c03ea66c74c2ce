"""Rows of smooth functions. They rest on trigonometric series, whose error `series` derives.

A product with the value of a series truncates it first: 1 ulp more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sectorch.ops import series as fitted
from sectorch.testing.strategies import SIG as SIG
from sectorch.testing.strategies import series

from .base import call, number, op

T = torch.Tensor
X = number(2, 3)
NARROW = number(2, 3, low=-0.9, high=0.9)
WIDE = number(4, 8, low=-20, high=20)
POSITIVE = number(2, 3, low=0.5, high=4)


EXP, SIGMOID, ERF, GELU = (series(s) for s in (fitted.EXP, fitted.SIGMOID, fitted.ERF, fitted.GELU))
SOFTPLUS, GATE, LOG = (series(s) for s in (fitted.SOFTPLUS, fitted.TANH_SOFTPLUS, fitted.LOG))
ATAN, I0E = series(fitted.ATAN), series(fitted.I0E_OF_ROOT)
LOG_NDTR = series(fitted.LOG_NDTR_ABOVE) + series(fitted.LOG_NDTR_BELOW)
RECIPROCAL, SQRT, RSQRT = (series(s) for s in (fitted.RECIPROCAL, fitted.SQRT, fitted.RSQRT))
E_X = 2.72 * (EXP + 1) + 0.5
"""Per unit of e^x: the series is on [-1, 0) and is multiplied by e^(n+1) <= e e^x; 1/2 for the input."""
GELU_TANH = max(GELU, series(fitted.GELU_TANH))
RECIP = RECIPROCAL + 1 + 1 + 2
"""For |x| >= 1/2: the series truncated, a power of two rounded (1/2 times a mantissa's 2), the input 1/2 / x^2."""

ROWS = (
    op(
        "exp",
        call(number(3, 4, low=-4, high=2)),
        call(number(8, low=-20, high=-5)),
        ulps=0.5 + 0.9,
        relative=E_X,
        why="E_X e^x, the factor's rounding, and e^-14 below the range",
        operands=1,
    ),
    op(
        "expm1",
        call(number(3, 4, low=-4, high=2)),
        ulps=1.4 + E_X,
        relative=E_X,
        why="as exp, of which |e^x - 1| + 1 is",
    ),
    op(
        "exp2",
        call(X),
        call(number(8, low=-3, high=3)),
        ulps=1.4,
        relative=E_X + 2.5,
        why="as exp; x ln 2 errs by ln 2 / 2 + 4 / 2",
    ),
    op("sinh", call(number(3, 4, low=-2, high=2)), ulps=E_X * 3.77 + 1.4, why="as exp: (e^x + e^-x) / 2 <= 3.77"),
    op("cosh", call(number(3, 4, low=-2, high=2)), ulps=1.4, relative=E_X, why="as exp"),
    op("sigmoid", call(X), call(WIDE), ulps=SIG, why="SIG", operands=1),
    op("tanh", call(X), call(WIDE), ulps=2 * SIG + 0.5, why="2 sigmoid(2 x) - 1", operands=1),
    op("erf", call(X), call(WIDE), ulps=ERF + 0.6, why="slope 1.13 / 2"),
    op("erfc", call(X), ulps=ERF + 0.6, why="1 - erf"),
    op(
        "gelu",
        call(X),
        call(WIDE),
        call(X, approximate="tanh", ulps=GELU_TANH + 1.2),
        ulps=GELU_TANH + 1.2,
        why="slope 1.13 / 2, and below 1/2 beyond 5.25",
        operands=1,
    ),
    op(
        "softplus",
        call(X),
        call(WIDE),
        call(X, 2.0),
        call(X, beta=0.7, ulps=1.43 * (SOFTPLUS + 4.4) + 2),
        ulps=SOFTPLUS + 1.5,
        why="slope 1 / 2 and e^-14 beyond 14; beta 0.7: x beta errs by 2.4, truncated 1, then over 0.7",
        operands=1,
    ),
    op("logsigmoid", call(X), ulps=SOFTPLUS + 1.5, why="softplus"),
    op(
        "silu",
        call(X),
        call(X, inplace=True),
        ulps=4 * (SIG + 1) + 0.5,
        why="|x| (sigmoid truncated) + 1/2",
        operands=1,
    ),
    op(
        "mish",
        call(X),
        call(X, inplace=True),
        ulps=4 * (GATE + 1.4) + 0.5,
        why="|x| (gate, slope 0.6 / 2, truncated) + 1/2",
    ),
    op(
        "elu",
        call(X),
        call(X, 0.3),
        call(X, alpha=1.5),
        call(X, inplace=True),
        ulps=1.5 * (EXP + 1.5) + 1.5,
        why="(e^x - 1) a: a (EXP + 1/2 + 1 truncation) + 1/2, and relu 1/2",
        operands=1,
    ),
    op(
        "celu",
        call(X),
        call(X, 2.0),
        call(X, alpha=1.5),
        ulps=1.5 * (EXP + 7) + 4,
        why="elu(x / a) a: x / a errs by 1/3 + 2 (twice, below and above 0), and elu is truncated, 1/2 |elu| for a",
    ),
    op(
        "selu",
        call(X),
        call(X, inplace=True, keys=(F.selu,)),
        call(X, keys=(F.selu,)),
        ulps=1.06 * (1.68 * (EXP + 1.5) + 2) + 2,
        why="elu with a = 1.673, truncated, times 1.05",
    ),
    op("hardsigmoid", call(X), call(number(8, low=-9, high=9)), ulps=3.2, why="6 / 2 for 1/6, 1/2 / 6", operands=1),
    op("hardswish", call(X), ulps=17.5, why="|x| (hardsigmoid truncated) + 1/2", operands=1),
    op("softsign", call(X), ulps=4 * (RECIP + 1) + 1, why="|x| (1 / (1 + |x|) truncated) + 1/2"),
    op("tanhshrink", call(X), ulps=2 * SIG + 1, why="x - tanh x"),
    op("softshrink", call(X), call(X, 0.3), ulps=1, why="x and a bound, 1/2 each"),
    op("hardshrink", call(X), call(X, 0.3), ulps=0.5, why="a choice of x or 0"),
    op("threshold", call(X, 0.5, 2.0), call(X, -0.3, 0.3), ulps=1, why="x or the encoded value"),
    op(
        "glu",
        call(number(2, 4)),
        call(number(4, 3), 0),
        ulps=4 * (SIG + 1) + 0.5,
        why="|a| (sigmoid truncated) + 1/2",
    ),
    op(
        "cos",
        call(X),
        call(number(8, low=-100, high=100)),
        ulps=1.5,
        why="slope 1 / 2; one term: 2^-22 + 2^-25",
        operands=1,
    ),
    op("sin", call(X), call(number(8, low=-100, high=100)), ulps=1.5, why="as cos", operands=1),
    op(
        "log",
        call(POSITIVE),
        call(number(8, low=100, high=1000)),
        ulps=LOG + 1.1,
        why="1 / x / 2 for x >= 1/2",
        operands=1,
    ),
    op("log2", call(POSITIVE), ulps=1.45 * (LOG + 2.1) + 0.75, why="log truncated, times 1.443; |log| / 2"),
    op("log10", call(POSITIVE), ulps=0.44 * (LOG + 2.1) + 0.75, why="log truncated, times 0.434; |log| / 2"),
    op("log1p", call(number(2, 3, low=-0.5, high=3)), ulps=LOG + 1.1, why="log of 1 + x"),
    op(
        "sqrt",
        call(number(2, 3, low=0.25, high=4)),
        call(number(8, low=0, high=0), ulps=0.0),
        ulps=2.83 * (SQRT + 1) + 1,
        why="2^(e/2) <= 2.83 times the series truncated, 1/2; input 1/2 / (2 sqrt x)",
    ),
    op(
        "rsqrt",
        call(number(2, 3, low=0.25, high=4)),
        ulps=1.42 * (RSQRT + 1) + 0.75 + 2,
        why="2^(-e/2) <= 1.42 times the series truncated, 1.42 / 2; input 1/2 / (2 x^1.5)",
    ),
    op(
        "i0e",
        call(X),
        call(WIDE),
        ulps=I0E + 2 * (0.71 * (RSQRT + 1) + 0.1) + 0.5,
        why="slope 2 at u = 1 / sqrt(1 + |x|), whose series truncated counts 2^(-1/2) times; slope 1 in x / 2",
        operands=1,
    ),
    op(
        "log_ndtr",
        call(X),
        call(number(8, low=-20, high=20)),
        ulps=LOG_NDTR + 0.4 + (RECIP + 1) + (LOG + 1.1) + 10 + 2,
        why="two series, slopes 0.8 / 2 and 1 at 1 / (1 + s); the log; s^2 / 2: s / 2, two truncations; log 2, 1/2",
        operands=1,
    ),
    op("reciprocal", call(POSITIVE), call(number(2, 3, low=-4, high=-0.5)), ulps=RECIP, why="RECIP"),
    op("atan", call(X), call(WIDE), ulps=2 * (ATAN + 1) + 2, why="two series, the arguments of both 1/2 and 1, pi/4"),
    op(
        "atan2",
        call(X, X),
        call(X, number(3)),
        call(POSITIVE, X.public),
        call(X.public, POSITIVE),
        ulps=6 * (ATAN + 3),
        whole=False,
        why="the quotient within 2 of the input's 1/2 over a larger operand of at least 1/4, and the series",
    ),
    op("asin", call(NARROW), ulps=16, why="1/2 and the root's 4 over sqrt(1 - x^2) >= 0.43; atan2"),
    op("acos", call(NARROW), ulps=17, why="as asin, and pi / 2"),
    op("asinh", call(X), ulps=8, why="log of at least 0.12 for x = 0 on: the root 4 and the log"),
    op("acosh", call(number(2, 3, low=1.25, high=4)), ulps=12, why="as asinh; slope 1 / sqrt(x^2 - 1) <= 1.4"),
    op(
        "atanh",
        call(NARROW),
        ulps=12,
        whole=False,
        why="two logs of at least 0.1, whose input's 1/2 counts ten times; half of it",
    ),
)
