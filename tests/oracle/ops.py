"""Small numeric building blocks shared by the reference models.

Everything works on numpy arrays in whatever float dtype the caller passes in
(float64 for a proof, float32 for an engine-like run).  Shapes are written in
comments as [rows, features]; a "row" is one token.
"""
from __future__ import annotations

import numpy as np


def sigmoid(x):
    out = np.empty_like(x)
    pos = x >= 0
    out[pos] = 1.0 / (1.0 + np.exp(-x[pos]))
    e = np.exp(x[~pos])
    out[~pos] = e / (1.0 + e)
    return out


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def softmax(x, axis=-1):
    m = x.max(axis=axis, keepdims=True)
    e = np.exp(x - m)
    return e / e.sum(axis=axis, keepdims=True)


def linear(x, w):
    """x [..., in], w [out, in] (checkpoint orientation)."""
    return x @ w.T


def rms(x, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def rms_plain(x, w, eps):
    """weight multiplies directly (DeltaNet output norm)."""
    return rms(x, eps) * w


def rms_centred(x, w, eps):
    """zero-centred weight: scale is 1 + w (every other norm)."""
    return rms(x, eps) * (1.0 + w)


def rms_grouped(x, w, group, eps):
    """One statistic per `group` consecutive features, one weight per feature."""
    y = rms(x.reshape(x.shape[:-1] + (-1, group)), eps)
    return y.reshape(x.shape) * (1.0 + w)


def l2_unit(x, eps=1e-6):
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + eps)


def inv_freq(dim, theta, dtype):
    j = np.arange(0, dim, 2, dtype=np.float64)
    return (1.0 / theta ** (j / dim)).astype(dtype)


def rope_half(x, pos, freqs):
    """Rotate the first 2*len(freqs) features; pairs are (j, j + n/2).

    x [T, heads, D] (or [T, D]), pos [T]."""
    n = len(freqs)
    ang = pos[:, None].astype(x.dtype) * freqs[None, :]
    c, s = np.cos(ang), np.sin(ang)
    if x.ndim == 3:
        c, s = c[:, None, :], s[:, None, :]
    a, b = x[..., :n], x[..., n:2 * n]
    return np.concatenate([a * c - b * s, b * c + a * s, x[..., 2 * n:]], axis=-1)


def top_indices(score, k):
    """k largest; ties go to the lower index (the rule this oracle fixes)."""
    return np.argsort(-score, kind="stable")[:k]


def causal_conv(x, tail, w, dilation=1):
    """Depthwise causal convolution.

    x [T, C]; tail [(K-1)*dilation, C] = the inputs before x (zeros at start);
    w [C, K], tap K-1 multiplies the current input.  Returns (y, new tail)."""
    K = w.shape[1]
    hist = np.concatenate([tail, x], axis=0)
    n = tail.shape[0]
    y = np.zeros_like(x)
    for k in range(K):
        lag = (K - 1 - k) * dilation
        y += hist[n - lag: n - lag + x.shape[0]] * w[:, k]
    return y, hist[hist.shape[0] - n:]


def swiglu(x, w_gate, w_up, w_down):
    return linear(silu(linear(x, w_gate)) * linear(x, w_up), w_down)
